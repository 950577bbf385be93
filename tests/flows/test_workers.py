"""`--workers`: one port, several processes, none left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import httpx
import pytest

from fakes.toy import write_toy_checkpoint
from fakes.toy_fleet import SlowRunner, toy_fleet
from flows.servers import LISTENING, Server, running, url_of
from fourhop.wire.sse import DONE, SSEDecoder

pytestmark = pytest.mark.slow


def workers_of(server: Server) -> list[int]:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


def test_workers_share_a_port_and_one_that_dies_is_replaced(tmp_path: Path) -> None:
    model = str(write_toy_checkpoint(tmp_path))
    with running(("frontend", model, "--port", "0", "--workers", "2")) as [server]:
        assert len(set(server.wait_for(LISTENING, 2))) == 1
        url = url_of(server)
        killed = workers_of(server)[0]
        os.kill(killed, signal.SIGKILL)
        server.wait_for(LISTENING, 3)
        assert re.search(rf"worker_died pid={killed}", server.output)
        workers = workers_of(server)
        assert len(workers) == 2 and killed not in workers
        for _ in range(8):
            answer = httpx.post(f"{url}/tokenize", json={"prompt": "hi"}, timeout=60)
            assert answer.json()["tokens"] == [104, 105]
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_routers_are_one_to_an_operator_and_drain_together(tmp_path: Path) -> None:
    engines = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")
    with running(("router", "--port", "0", "--workers", "2", *engines)) as [server]:
        server.wait_for(LISTENING, 2)
        url = url_of(server)
        drained = httpx.post(f"{url}/router/drain", json={"worker": "http://127.0.0.1:2"}, timeout=60)
        assert drained.json()["draining"] is True
        drains = [
            f'fourhop_router_draining{{worker="{worker}",engine="http://127.0.0.1:2",role="decode"}} 1.0'
            for worker in (0, 1)
        ]
        told = httpx.get(f"{url}/metrics", timeout=60).text
        assert all(line in told for line in drains)
        os.kill(workers_of(server)[0], signal.SIGKILL)
        server.wait_for(LISTENING, 3)
        told = httpx.get(f"{url}/metrics", timeout=60).text
        assert all(line in told for line in drains)


async def stream(session: aiohttp.ClientSession, url: str, name: str, num_tokens: int) -> tuple[list[int], str | None]:
    """A request over a connection of its own: its tokens, and how it ended; None if its connection broke."""
    body = {
        "token_ids": list(range(20, 32)),
        "sampling_params": {"max_tokens": num_tokens, "temperature": 0.0},
        "stream": True,
        "request_id": name,
    }
    ids: list[int] = []
    decoder = SSEDecoder()
    with contextlib.suppress(aiohttp.ClientError):
        async with session.post(f"{url}/inference/v1/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for data in answer.content.iter_any():
                for event in decoder.feed(data):
                    for choice in json.loads(event)["choices"] if event != DONE else []:
                        ids += choice["token_ids"]
                        if choice["finish_reason"]:
                            return ids, choice["finish_reason"]
    return ids, None


def test_a_killed_process_of_a_router_costs_its_own_streams_only() -> None:
    class PacedRunner(SlowRunner):
        """Of this test alone, which changes its pace."""

    async def scenario() -> None:
        async with toy_fleet(1, 1, runner=PacedRunner) as fleet, AsyncExitStack() as stack:
            engines = ("--prefill", fleet.prefill[0].url, "--decode", fleet.decode[0].url)
            server = Server("router", "--port", "0", "--workers", "2", *engines)
            stack.callback(server.stop)
            await asyncio.to_thread(server.wait_for, LISTENING, 2)
            url = url_of(server)
            connector = aiohttp.TCPConnector(force_close=True)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            (expected, _) = await stream(session, url, "first", 60)
            streams = [asyncio.create_task(stream(session, url, f"r{number}", 60)) for number in range(8)]
            async with asyncio.timeout(30.0):
                while len(fleet.decode[0].engine.loop.jobs) < 8:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            os.kill(workers_of(server)[0], signal.SIGKILL)
            ends = await asyncio.gather(*streams)
            assert all(ids == expected[: len(ids)] for ids, _ in ends)
            assert all(ids == expected for ids, finish in ends if finish is not None)
            await asyncio.to_thread(server.wait_for, LISTENING, 3)

            await fleet.settle()
            PacedRunner.step_s = 0.1  # so that 70 steps outlast the abort on its way, however busy the machine
            long = asyncio.create_task(stream(session, url, "long", 70))
            async with asyncio.timeout(30.0):
                while not len(fleet.decode[0].engine.loop.jobs):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            async with session.post(f"{url}/inference/v1/abort_requests", json={"request_ids": ["long"]}) as answer:
                assert answer.status == 200, await answer.text()
            assert (await long)[1] == "abort"
            for _ in range(4):  # whichever process takes the connection
                async with session.get(f"{url}/router/requests/long") as answer:
                    assert answer.status == 200, await answer.text()
            await fleet.settle()

    asyncio.run(scenario())
