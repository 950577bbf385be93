"""Engines join a running router: when they get requests, who may, and the whole life of one."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from contracts.token_server import finishes_of, tokens_of, until
from fakes import virtual_time
from fakes.asgi import Exchange
from fakes.fleet import bench
from fakes.joining import D0, D1, P0, P1, REQUEST, ask, expected, join, join_and_see, leave, tidy
from fakes.stub_engine import StubEngine
from fourhop.router.app import Router
from fourhop.router.config import RouterConfig
from fourhop.router.dial import Dial
from fourhop.router.policy import EngineRole
from fourhop.router.routes import health_route, router_routes
from fourhop.service import ServerConfig, create_app
from fourhop.wire.errors import ClientError, Forbidden, NotFound
from fourhop.wire.join import JoinRequest, LeaveRequest


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


def test_an_engine_that_joins_gets_requests_once_it_was_seen() -> None:
    async def scenario() -> None:
        async with bench(1, 1, engines_join=True) as one:
            new = one.start(D1, "decode")
            join(one, D1, "decode")
            assert not one.router.fleet.workers[D1].is_usable
            await until(lambda: one.router.fleet.workers[D1].is_usable)
            for _ in range(2):
                await ask(one.router)
            assert len(new.requests) == 1 and new.num_pulled == 1
            await one.settle()

    run(scenario())


def test_a_router_without_an_engine_says_so_until_one_joins() -> None:
    async def scenario() -> None:
        async with bench(0, 0, engines_join=True) as one:
            assert one.router.health() == "no engine can serve the request: none is known yet"
            one.start(D0, "decode")
            await join_and_see(one, D0, "decode")
            assert one.router.health() is None
            await ask(one.router)
            await one.settle()

    run(scenario())


def test_a_router_follows_its_file(tmp_path: Path) -> None:
    """From the start; what is wrong changes nothing, and the file's engines are beside those of the flags."""
    path = tmp_path / "engines.json"

    def write(text: str, at_s: int) -> None:
        path.write_text(text)
        os.utime(path, (at_s, at_s))

    async def scenario() -> None:
        write('{"decode": ["http://d1"]}', 1)
        async with bench(1, 1, engines_file=path) as one:
            one.start(D1, "decode")
            (source,) = one.router.discovery.sources

            async def look() -> list[str]:
                await one.router.discovery.look(source)
                await tidy(one)
                return list(one.router.fleet.workers)

            assert await look() == [P0, D0, D1]
            write("{", 2)
            assert await look() == [P0, D0, D1]
            assert one.count("fourhop_router_source_up", source="file") == 0
            one.start(P1, "prefill")
            write('{"prefill": ["http://p1"]}', 3)
            assert await look() == [P0, D0, D1, P1]
            assert await look() == [P0, D0, P1]
            assert one.count("fourhop_router_source_engines", source="file") == 1
            await until(lambda: one.router.fleet.workers[P1].is_usable)
            for _ in range(2):
                await ask(one.router)
            assert len(one.known[P1].requests) == 1
            await one.settle()

    run(scenario())


def test_only_a_router_that_takes_engines_takes_them() -> None:
    async def scenario() -> None:
        async with bench() as one:
            with pytest.raises(Forbidden, match="--engines-join"):
                join(one, D1, "decode")
            with pytest.raises(Forbidden, match="--engines-join"):
                await leave(one, D0)
        async with bench(engines_join=True) as one:
            for url in ("d1", "http://a:99999", "http://[::1", "http://a..b", "http://a?b", ""):
                with pytest.raises(ClientError, match="not the URL of an engine") as refused:
                    join(one, url, "decode")
                assert refused.value.param == "url" and refused.value.status == 400
            with pytest.raises(ClientError, match="is a decode engine of this router") as refused:
                join(one, D0, "prefill")
            assert refused.value.param == "role"
            with pytest.raises(NotFound, match="has not joined"):
                await leave(one, D0)
            assert list(one.router.fleet.workers) == [P0, D0]
            join(one, D0 + "/", "decode")
            await leave(one, D0)
            assert not one.router.fleet.workers[D0].is_leaving, "a flag names it too"

    run(scenario())


def test_over_http() -> None:
    async def scenario() -> None:
        async with bench(1, 1, engines_join=True) as one:
            one.start(D1, "decode")
            routes = [*router_routes(one.router), health_route(one.router)]
            app = create_app(routes=routes, config=ServerConfig(), registry=one.registry)

            async def post(path: str, body: object) -> Exchange:
                headers = {"content-type": "application/json"}
                return await Exchange("POST", path, headers, [msgspec.json.encode(body)]).run(app)

            told = {"url": D1, "role": "decode", "leaving": False, "in_flight": 0, "num_migrated": 0}
            joined = await post("/router/join", {"url": D1, "role": "decode", "every_s": 5})
            assert (joined.status, joined.json()) == (200, told)
            left = await post("/router/leave", {"url": D1})
            assert (left.status, left.json()) == (200, told | {"leaving": True})
            health = (await Exchange("GET", "/health").run(app)).json()
            assert [one["leaving"] for one in health["engines"]] == [False, False, True]  # type: ignore[index]
            for wrong in (
                {"url": D1, "role": "both"},
                {"url": D1},
                {"url": D1, "role": "decode", "every_s": 0},
                {"url": D1, "role": "decode", "model": "x"},
                {"url": "http://a:99999", "role": "decode"},
            ):
                assert (await post("/router/join", wrong)).status == 400
            assert (await post("/router/leave", {"url": "http://x"})).status == 404

    run(scenario())


@asynccontextmanager
async def living(engines: dict[str, StubEngine]) -> AsyncIterator[Router]:
    """A router that engines join, in virtual time, its watchers and its housekeeping at work."""

    @asynccontextmanager
    async def dial(config: RouterConfig) -> AsyncIterator[Dial]:
        yield lambda url, role: (engines[url], engines[url])

    router = Router(
        RouterConfig(engines_join=True),
        registry=CollectorRegistry(),
        dial=dial,
        clock=virtual_time.now,
        wall_clock=lambda: 1000.0 + virtual_time.now(),
        router_id="ours",
    )
    async with router.running():
        yield router


async def soon(what: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not what():  # noqa: ASYNC110 (time is virtual)
            await asyncio.sleep(0.1)


async def beat(router: Router, url: str, role: EngineRole) -> None:
    while True:
        router.membership.join(JoinRequest(url, role, 5.0))
        await asyncio.sleep(5.0)


def test_an_engine_joins_serves_and_leaves_while_it_streams(caplog: pytest.LogCaptureFixture) -> None:
    """The whole life, in the router's own time: heartbeats, a stream that is handed on, an engine that falls silent."""
    caplog.set_level(logging.WARNING)
    engines = {name: StubEngine(name, role="decode") for name in (D0, D1)}
    for engine in engines.values():
        engine.peers = engines

    async def scenario() -> None:
        async with living(engines) as router:
            beats = [asyncio.create_task(beat(router, name, "decode")) for name in (D0, D1)]
            await soon(lambda: sum(worker.is_usable for worker in router.fleet.workers.values()) == 2)
            async with aclosing(router.generate(REQUEST)) as chunks:
                received = [await anext(chunks) for _ in range(3)]
                first, other = (D0, D1) if engines[D0].num_open else (D1, D0)
                beats[first == D1].cancel()
                await router.membership.leave(LeaveRequest(first))
                received += [chunk async for chunk in chunks]
            assert tokens_of(received) == expected() and finishes_of(received) == ["length"]
            assert len(engines[first].requests) == len(engines[other].requests) == 1
            await soon(lambda: first not in router.fleet.workers)
            await ask(router)
            assert len(engines[other].requests) == 2

            beats[other == D1].cancel()  # falls silent, and is taken to be gone
            await asyncio.sleep(8.0)
            assert router.fleet.workers[other].is_usable
            await soon(lambda: not router.fleet.workers, within_s=12.0)
            assert all(engine.is_idle() for engine in engines.values()) and not router.ledger.owed
            await asyncio.gather(*beats, return_exceptions=True)

    virtual_time.run(scenario())
    assert not [record for record in caplog.records if record.exc_info]
