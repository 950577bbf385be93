"""What the router does without is counted, told seldom, and shown while it lasts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from fakes.asgi import Exchange
from fakes.fleet import Bench, bench
from fakes.stub_engine import Fault
from fourhop.router.config import GoodputConfig
from fourhop.router.degraded import CAUSES
from fourhop.router.routes import health_route
from fourhop.wire.errors import ErrorBody, PeerError, PeerRefused, TransferError
from fourhop.wire.generate import GenerateRequest, SamplingParams


async def ask(fleet: Bench, name: str = "r") -> None:
    request = GenerateRequest(token_ids=[1, 2, 3], sampling_params=SamplingParams(max_tokens=4), request_id=name)
    async for _ in fleet.router.generate(request):
        pass


def degraded(fleet: Bench) -> set[str]:
    values = {cause: fleet.registry.get_sample_value("fourhop_router_degraded", {"cause": cause}) for cause in CAUSES}
    assert set(values.values()) <= {0.0, 1.0}
    return {cause for cause, value in values.items() if value}


async def health(fleet: Bench) -> Any:
    exchange = Exchange("GET", "/health")
    await exchange.run(health_route(fleet.router).app)
    assert exchange.status == 200
    return exchange.json()


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


def test_a_fleet_that_is_well_lacks_nothing() -> None:
    async def scenario() -> None:
        async with bench(1, 1) as fleet:
            await ask(fleet)
            assert degraded(fleet) == set()
            assert (await health(fleet))["degraded"] == {}
            assert fleet.router.metrics.fallbacks is not None
            assert "fourhop_router_fallbacks_total" not in str(list(fleet.registry.collect()))

    run(scenario())


@pytest.mark.parametrize(("side", "cause"), [("decode", "no_decode"), ("prefill", "no_prefill")])
def test_a_side_that_is_gone_is_told_until_it_is_back(side: str, cause: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def scenario() -> None:
        async with bench(1, 1) as fleet:
            engine = {"prefill": fleet.prefill, "decode": fleet.decode}[side][0]
            engine.ill = PeerError("broken")
            await fleet.look()
            assert degraded(fleet) == {cause, "engine_down"}
            fleet.clock.now_s += 5.0
            assert (await health(fleet))["degraded"] == {cause: 5.0, "engine_down": 5.0}
            for number in range(20):
                await ask(fleet, f"r{number}")
            assert fleet.count("fourhop_router_fallbacks_total", cause=cause) == 20
            engine.ill = None
            fleet.clock.now_s += 5.0
            await fleet.look()
            assert degraded(fleet) == set()
            await ask(fleet)
            assert fleet.count("fourhop_router_fallbacks_total", cause=cause) == 20

    run(scenario())
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if f"cause={cause}" in line] == [
        f"degraded cause={cause}",
        f'fallback cause={cause} times=1 last="request r0 whole on http://{"p0" if side == "decode" else "d0"}"',
        f"recovered cause={cause} after_s=10.0000",
    ]


def test_replicas_lack_no_prefill_engine() -> None:
    async def scenario() -> None:
        async with bench(0, 2) as fleet:
            await ask(fleet)
            assert degraded(fleet) == set()
            assert fleet.count("fourhop_router_fallbacks_total", cause="no_prefill") == 0

    run(scenario())


def test_engines_that_cannot_hand_over_are_told() -> None:
    async def scenario() -> None:
        async with bench(1, 1) as fleet:
            fleet.decode[0].connector = "another"
            await fleet.look()
            await ask(fleet)
            assert degraded(fleet) == {"no_pair"}
            assert fleet.count("fourhop_router_fallbacks_total", cause="no_pair") == 1

    run(scenario())


def test_who_wants_whole_requests_misses_no_pair() -> None:
    async def scenario() -> None:
        async with bench(1, 1, goodput=GoodputConfig(placement="local")) as fleet:
            await ask(fleet)
            assert degraded(fleet) == set()
            assert "fallbacks_total" not in str(list(fleet.registry.collect()))

    run(scenario())


def test_a_prompt_computed_twice_is_counted_by_cause() -> None:
    async def scenario() -> None:
        async with bench(1, 1) as fleet:
            fleet.decode[0].faults = [Fault(0, TransferError("epoch", "another life"))]
            await ask(fleet)
            assert fleet.count("fourhop_router_fallbacks_total", cause="kv_failed") == 1
            assert fleet.count("fourhop_router_no_transfer_total", cause="failed") == 1

    run(scenario())


def test_events_that_cannot_be_heard_are_told_until_the_engine_tells_no_more() -> None:
    async def scenario() -> None:
        async with bench(1, 1) as fleet:
            caches = fleet.router.caches
            caches._lost("http://p0", "unheard", "its subscription failed")
            assert degraded(fleet) == {"events_unheard"}
            assert fleet.count("fourhop_router_fallbacks_total", cause="events_unheard") == 1
            caches.follow(fleet.router.fleet.workers["http://p0"])
            assert degraded(fleet) == set()

    run(scenario())


def test_a_request_that_goes_on_elsewhere_is_counted() -> None:
    async def scenario() -> None:
        async with bench(2, 1) as fleet:
            for engine in fleet.prefill:
                engine.faults = [Fault(0, PeerError("gone"))]
            await ask(fleet)
            assert fleet.count("fourhop_router_fallbacks_total", cause="retry_fault") == 2

    run(scenario())


def test_a_stream_that_cannot_move_is_counted_once_a_look() -> None:
    async def scenario() -> None:
        async with bench(1, 2) as fleet:
            for engine in fleet.decode:
                engine.migrate_error = PeerRefused(404, ErrorBody("no such path", "NotFound", None, 404))
            request = GenerateRequest(token_ids=[1, 2, 3], sampling_params=SamplingParams(max_tokens=9))
            async with aclosing(fleet.router.generate(request)) as chunks:
                for _ in range(3):
                    await anext(chunks)
                (busy,) = [one.name for one in fleet.decode if one.num_open]
                assert (await fleet.router.migration.drain(busy)).num_migrated == 0
            assert fleet.count("fourhop_router_fallbacks_total", cause="not_moved") == 1

    run(scenario())
