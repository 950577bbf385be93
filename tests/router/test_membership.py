"""Engines come and go while requests run, and no request is lost to it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from contracts.token_server import tokens_of
from fakes.asgi import Exchange
from fakes.fleet import Bench, bench
from fakes.stub_engine import StubEngine, next_token
from fourhop.router.app import router_routes
from fourhop.router.config import RouterConfig
from fourhop.router.membership import Members, read_engines
from fourhop.service import ServerConfig, create_app
from fourhop.wire.errors import ClientError, NotFound, StartError
from fourhop.wire.generate import GenerateRequest, SamplingParams

REQUEST = GenerateRequest(
    token_ids=[1, 2, 3, 4, 5], sampling_params=SamplingParams(max_tokens=12, seed=11), request_id="r"
)


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


def expected() -> list[int]:
    output: list[int] = []
    for _ in range(12):
        output.append(next_token(REQUEST, output))
    return output


def engine(one: Bench, name: str, role: str) -> StubEngine:
    """An engine that is there, and that the router does not know of."""
    new = StubEngine(name, role=role, peers=one.prefill[0].peers)  # type: ignore[arg-type]
    one.prefill[0].peers[name] = new
    return new


async def ask(one: Bench) -> None:
    received = [chunk async for chunk in one.router.generate(REQUEST)]
    assert tokens_of(received) == expected()


def test_an_engine_that_joins_gets_requests() -> None:
    async def scenario() -> None:
        async with bench() as one:
            new = engine(one, "http://d1", "decode")
            await one.router.membership.join("http://d1", "decode")
            for _ in range(2):
                await ask(one)
            assert len(new.requests) == 1 and new.num_pulled == 1
            assert one.router.membership.members() == Members(["http://p0"], ["http://d0", "http://d1"], [])
            await one.settle()

    run(scenario())


def test_an_engine_that_leaves_hands_its_streams_on_and_is_gone_when_it_has_nothing() -> None:
    async def scenario() -> None:
        async with bench(1, 2) as one:
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                received = [await anext(chunks) for _ in range(4)]
                leaving = next(name for name in ("http://d0", "http://d1") if one.router.fleet.workers[name].in_flight)
                await one.router.membership.leave(leaving)
                await one.router.membership.look()
                assert one.router.membership.members().leaving == [leaving]
                received += [chunk async for chunk in chunks]
            assert tokens_of(received) == expected()
            await one.settle()
            await one.router.membership.look()
            assert leaving not in one.router.fleet.workers
            await ask(one)
            with pytest.raises(NotFound):
                await one.router.membership.leave(leaving)

    run(scenario())


def test_an_engine_that_comes_back_before_it_is_gone_stays() -> None:
    async def scenario() -> None:
        async with bench(1, 2) as one:
            await one.router.membership.leave("http://d1")
            await one.router.membership.join("http://d1", "decode")
            await one.router.membership.look()
            assert one.router.fleet.workers["http://d1"].is_usable
            with pytest.raises(ClientError, match="is a decode engine of this router"):
                await one.router.membership.join("http://d1", "prefill")
            with pytest.raises(ClientError, match="not the URL of an engine"):
                await one.router.membership.join("d2", "decode")

    run(scenario())


def test_over_http() -> None:
    async def scenario() -> None:
        async with bench(1, 2) as one:
            engine(one, "http://p1", "prefill")
            app = create_app(routes=router_routes(one.router), config=ServerConfig(), registry=one.registry)

            async def post(path: str, body: dict[str, str]) -> Exchange:
                headers = {"content-type": "application/json"}
                return await Exchange("POST", path, headers, [msgspec.json.encode(body)]).run(app)

            joined = await post("/router/join", {"worker": "http://p1", "role": "prefill"})
            assert joined.json() == {
                "prefill": ["http://p0", "http://p1"],
                "decode": ["http://d0", "http://d1"],
                "leaving": [],
            }
            left = await post("/router/leave", {"worker": "http://d1"})
            assert left.json() == {
                "prefill": ["http://p0", "http://p1"],
                "decode": ["http://d0"],
                "leaving": ["http://d1"],
            }
            assert (await post("/router/join", {"worker": "http://x", "role": "both"})).status == 400
            assert (await post("/router/leave", {"worker": "http://x"})).status == 404

    run(scenario())


def write(path: Path, prefill: list[str], decode: list[str]) -> None:
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_bytes(msgspec.json.encode({"prefill": prefill, "decode": decode}))
    os.utime(path, ns=(before + 10**9, before + 10**9))


def test_the_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"

    async def scenario() -> None:
        async with bench(1, 1) as one:
            membership = one.router.membership
            membership._path = path
            new = engine(one, "http://d1", "decode")
            write(path, ["http://p0"], ["http://d0", "http://d1"])
            await membership.look()
            assert membership.members().decode == ["http://d0", "http://d1"]
            one.router.fleet.workers["http://d0"].is_draining = True  # an operator's own doing is left alone
            write(path, ["http://p0"], ["http://d1", "http://d0"])
            await membership.look()
            assert one.router.fleet.workers["http://d0"].is_draining
            write(path, ["http://p0"], ["http://d1"])
            await membership.look()
            assert membership.members() == Members(["http://p0"], ["http://d1"], [])
            for wrong in (b"{", b"{}", b'{"prefill": ["p"]}', b'{"decoder": []}'):
                path.write_bytes(wrong)
                await membership.look()
            path.unlink()
            await membership.look()
            assert membership.members() == Members(["http://p0"], ["http://d1"], [])
            await ask(one)
            assert len(new.requests) == 1
            await one.settle()

    run(scenario())


def test_a_router_starts_with_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    write(path, ["http://p0"], ["http://d0"])
    assert read_engines(path).roles() == {"http://p0": "prefill", "http://d0": "decode"}
    RouterConfig(engines_file=path)
    with pytest.raises(StartError, match="not by both"):
        RouterConfig(prefill=("http://p0",), engines_file=path)
    with pytest.raises(StartError, match="No such file"):
        read_engines(tmp_path / "nothing.json")
    path.write_bytes(b'{"prefill": ["http://p0"], "decode": ["http://p0"]}')
    with pytest.raises(StartError, match="one role only: http://p0 is listed twice"):
        read_engines(path)
