"""Tiers joined into processes."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from fakes.engines import toy_pair
from fourhop.compose import until_idle
from fourhop.engine.durations import Durations
from fourhop.frontend.metrics import FrontendMetrics
from fourhop.wire.generate import GenerateRequest, SamplingParams


def test_a_frontend_and_an_engine_share_a_registry() -> None:
    """As they do in `fourhop serve`; a name that both had would be refused."""
    registry = CollectorRegistry()
    FrontendMetrics(registry)
    for histogram in Durations().histograms:
        registry.register(histogram)


def test_an_engine_that_stops_waits_for_what_others_are_to_have_of_it() -> None:
    held = GenerateRequest(
        token_ids=list(range(2, 20)),
        request_id="held",
        sampling_params=SamplingParams(max_tokens=1),
        kv_transfer_params={"do_remote_decode": True},
    )

    async def scenario() -> None:
        async with toy_pair() as pair:
            engine = pair.prefill
            await until_idle(engine, 10.0)
            async for _ in engine.generate(held):
                pass
            assert engine.info().num_held_blocks > 0
            await until_idle(engine, 0.01)
            assert engine.info().num_held_blocks > 0, "it waits no longer than it is told"
            waiting = asyncio.create_task(until_idle(engine, 10.0))
            await asyncio.sleep(0)
            assert not waiting.done()
            await engine.abort(["held"])
            await waiting
            assert engine.info().num_held_blocks == 0

    asyncio.run(scenario())


def test_one_that_failed_is_not_waited_for() -> None:
    async def scenario() -> None:
        async with toy_pair() as pair:
            held = GenerateRequest(
                token_ids=[2, 3, 4, 5, 6],
                sampling_params=SamplingParams(max_tokens=1),
                kv_transfer_params={"do_remote_decode": True},
            )
            async for _ in pair.prefill.generate(held):
                pass
            pair.prefill.loop.failure = "out of memory"
            await until_idle(pair.prefill, 10.0)
            pair.prefill.loop.failure = None
            await pair.prefill.abort([held.request_id])

    asyncio.run(scenario())
