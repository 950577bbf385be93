"""Real engine processes that are killed at any moment and start again at the same addresses."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from fourhop.engine.toy import toy_output
from fourhop.router.app import Router
from fourhop.router.config import RouterConfig
from fourhop.wire.errors import FourhopError
from fourhop.wire.generate import GenerateRequest, SamplingParams

PROGRAM = Path(__file__).with_name("toy_server.py")
NUM_KILLS = 8
NUM_REQUESTS = 6
SETTLE_S = 20.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class Child:
    """An engine's process, at addresses that it keeps."""

    def __init__(self, connector: str) -> None:
        self._arguments = (str(PROGRAM), connector, str(free_port()), str(free_port()))
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._arguments[2]}"

    async def start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(sys.executable, *self._arguments, stdout=pipe)
        assert self._process.stdout is not None
        assert await self._process.stdout.readline() == b"ready\n"

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@asynccontextmanager
async def pipeline(connector: str) -> AsyncIterator[tuple[Router, list[Child]]]:
    children = [Child(connector), Child(connector)]
    await asyncio.gather(*(child.start() for child in children))
    config = RouterConfig(
        (children[0].url,),
        (children[1].url,),
        first_chunk_timeout_s=10.0,
        idle_timeout_s=5.0,
        probe_interval_s=0.1,
        probe_backoff_s=0.2,
    )
    router = Router(config, registry=CollectorRegistry())
    try:
        async with router.running():
            yield router, children
    finally:
        await asyncio.gather(*(child.kill() for child in children))


async def ask(router: Router, prompt: list[int], num_tokens: int) -> FourhopError | None:
    """The error of a request, if it had one. What came before it must be right, and all of it if there was none."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    tokens: list[int] = []
    error = None
    try:
        async with aclosing(router.generate(GenerateRequest(token_ids=prompt, sampling_params=params))) as chunks:
            async for chunk in chunks:
                tokens += [token for choice in chunk.choices for token in choice.token_ids]
    except FourhopError as caught:
        error = caught
    expected = toy_output(prompt, num_tokens)
    assert tokens == (expected if error is None else expected[: len(tokens)])
    return error


async def nothing_is_left(router: Router) -> None:
    """All engines are up and all of their blocks are free."""
    workers = list(router.fleet.workers.values())
    async with asyncio.timeout(SETTLE_S):
        while True:
            infos = [worker.info for worker in workers if worker.down is None and worker.info is not None]
            is_free = len(infos) == len(workers) and all(info.num_free_blocks == info.num_blocks for info in infos)
            if is_free and not router.ledger.owed and not any(worker.in_flight for worker in workers):
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("connector", ["shm", "tcp"])
def test_killed_engines(connector: str) -> None:
    """Whoever is killed when: every request ends with its tokens or an error, and the next ones are split again."""

    async def main() -> None:
        rng = random.Random(connector)
        async with pipeline(connector) as (router, children):
            for _ in range(NUM_KILLS):
                prompts = [[rng.randrange(10, 107) for _ in range(rng.randrange(1, 80))] for _ in range(NUM_REQUESTS)]
                asking = asyncio.gather(*(ask(router, prompt, 60) for prompt in prompts))
                await asyncio.sleep(rng.uniform(0.0, 0.25))
                victim = rng.choice(children)
                await victim.kill()
                await victim.start()
                await asking
                await nothing_is_left(router)
                assert await ask(router, prompts[0], 5) is None
            num_handed_over = router.metrics.placements.labels("split")._value.get()
            assert num_handed_over > NUM_KILLS

    asyncio.run(main())
