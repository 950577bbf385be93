"""A real engine process that is stopped, not killed: its connections stay open and nothing comes any more."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from fourhop.engine.toy import toy_output
from fourhop.router.app import Router
from fourhop.router.config import RouterConfig
from fourhop.wire.generate import GenerateRequest, SamplingParams

PROGRAM = Path(__file__).parents[1] / "faults" / "toy_server.py"
LIMIT_S = 10.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@asynccontextmanager
async def engine() -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    port = free_port()
    arguments = (str(PROGRAM), "shm", str(port), str(free_port()))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        await process.communicate()


@pytest.mark.parametrize(("silent", "num_tokens"), [(0, 0), (2, 5)])
def test_a_stopped_engine_keeps_no_request(silent: int, num_tokens: int) -> None:
    """All four streams end with their tokens, at another engine, and the stopped one is used again when it goes on."""
    prompts = [[20 + (7 * place + number) % 80 for place in range(60)] for number in range(4)]

    async def follow(router: Router, prompt: list[int], begun: asyncio.Event) -> list[int]:
        params, tokens = SamplingParams(max_tokens=150, temperature=0.0), list[int]()
        async with aclosing(router.generate(GenerateRequest(token_ids=prompt, sampling_params=params))) as chunks:
            async for chunk in chunks:
                tokens += [token for choice in chunk.choices for token in choice.token_ids]
                if len(tokens) >= num_tokens:
                    begun.set()
        return tokens

    async def main() -> None:
        async with AsyncExitStack() as stack:
            engines = await asyncio.gather(*(stack.enter_async_context(engine()) for _ in range(4)))
            urls = [url for url, _ in engines]
            router = Router(RouterConfig(tuple(urls[:2]), tuple(urls[2:])), registry=CollectorRegistry())
            await stack.enter_async_context(router.running())
            begun = [asyncio.Event() for _ in prompts]
            readers = [asyncio.create_task(follow(router, *each)) for each in zip(prompts, begun, strict=True)]
            if num_tokens:
                await asyncio.gather(*(event.wait() for event in begun))
            else:
                await asyncio.sleep(0.02)
            process = engines[silent][1]
            process.send_signal(signal.SIGSTOP)
            stopped_s = time.monotonic()
            try:
                assert await asyncio.gather(*readers) == [toy_output(prompt, 150) for prompt in prompts]
                print(f"all ended after {time.monotonic() - stopped_s:.1f} s")
            finally:
                process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(LIMIT_S):
                while router.fleet.workers[urls[silent]].down is not None or router.ledger.owed:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

    asyncio.run(main())
