"""One trace over all hops: from the client's header, through frontend and router, to every engine."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from fakes.asgi import Exchange
from fakes.fleet import Bench, bench
from fakes.serving import serving
from fakes.stock_vllm import StockVLLM
from fakes.stub_engine import Fault, StubEngine
from fakes.toy import write_toy_checkpoint
from fakes.toy_fleet import toy_fleet
from fourhop.checkpoint import Checkpoint
from fourhop.frontend.app import create
from fourhop.frontend.config import FrontendConfig
from fourhop.router.routes import router_routes
from fourhop.service import ServerConfig, create_app
from fourhop.service.tracing import Span, Tracer
from fourhop.tokens.connection import Timeouts, open_session
from fourhop.tokens.routes import token_routes
from fourhop.tokens.traced import traced
from fourhop.tokens.upstream import Upstream
from fourhop.tokens.vllm import VLLMTokenServer
from fourhop.wire.errors import PeerError
from fourhop.wire.generate import GenerateRequest, SamplingParams
from fourhop.wire.moments import intervals
from fourhop.wire.trace import TraceContext, parse_traceparent

CLIENT = TraceContext(7, 8)
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"))


@asynccontextmanager
async def all_hops(folder: Path, told: list[Span], **settings: Any) -> AsyncIterator[tuple[Starlette, Bench]]:
    """A frontend, by a connection a router, and its engines; all of ours tell."""
    async with bench(tracer_of=lambda clock: Tracer("router", told.append, clock), **settings) as fleet:
        routes = router_routes(fleet.router)
        tokens = create_app(routes=routes, config=ServerConfig(), registry=CollectorRegistry())
        async with serving(tokens) as url, open_session() as session:
            upstream = Upstream(url, session, timeouts=Timeouts())
            tracer = Tracer("frontend", told.append)
            yield create(FrontendConfig(), Checkpoint("toy", folder), ServerConfig(), upstream, tracer=tracer), fleet


async def chat(app: Starlette, traceparent: str | None = None, **fields: Any) -> Exchange:
    headers = {"content-type": "application/json", "x-request-id": "one"}
    if traceparent is not None:
        headers["traceparent"] = traceparent
    return await Exchange("POST", "/v1/chat/completions", headers, [json.dumps(CHAT | fields).encode()]).run(app)


def run(folder: Path, scenario: Callable[[Starlette, Bench, list[Span]], Any], **settings: Any) -> None:
    async def whole() -> None:
        told: list[Span] = []
        async with all_hops(folder, told, **settings) as (app, fleet):
            await scenario(app, fleet, told)
            await fleet.settle()

    asyncio.run(whole())


def hops(told: list[Span]) -> dict[str, Span]:
    return {span.tier: span for span in told if span.is_hop}


@pytest.mark.parametrize("stream", [False, True])
def test_spans_of_all_hops_hang_together(folder: Path, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fourhop.request")

    async def scenario(app: Starlette, fleet: Bench, told: list[Span]) -> None:
        assert (await chat(app, CLIENT.header, stream=stream)).status == 200
        frontend, router = hops(told)["frontend"], hops(told)["router"]
        assert frontend.parent == CLIENT and router.parent == frontend.context
        assert {span.context.trace_id for span in told} == {CLIENT.trace_id}
        asked = [request.traceparent for engine in fleet.engines for request in engine.requests]
        assert len(asked) == 2 and {parse_traceparent(one) for one in asked} == {router.context}
        assert frontend.attributes | {"fourhop.outcome": "length"} == frontend.attributes
        assert frontend.attributes["gen_ai.usage.completion_tokens"] == 4
        told_by_router = router.attributes
        assert told_by_router["fourhop.reason"] == "split"
        assert (told_by_router["fourhop.prefill"], told_by_router["fourhop.decode"]) == ("http://p0", "http://d0")
        assert told_by_router["gen_ai.request.id"] == "chatcmpl-one"
        inside = {span.name for span in told if span.parent == router.context and not span.is_hop}
        assert {"queue", "placement", "finish"} <= inside
        assert {"render", "first_token", "decode"} <= {span.name for span in told if span.parent == frontend.context}
        lines = [record.getMessage() for record in caplog.records if record.name == "fourhop.request"]
        assert len(lines) == 2 and all(f"trace_id={CLIENT.trace_id:032x}" in line for line in lines)

    run(folder, scenario)


def test_every_choice_has_its_own_intervals(folder: Path) -> None:
    async def scenario(app: Starlette, fleet: Bench, told: list[Span]) -> None:
        assert (await chat(app, n=2)).status == 200
        router = hops(told)["router"]
        choices = [span.attributes["fourhop.choice"] for span in told if span.parent == router.context]
        assert set(choices) == {0, 1} and choices.count(0) == choices.count(1)

    run(folder, scenario)


def test_what_nobody_wants_recorded_is_passed_on(folder: Path) -> None:
    unwanted = CLIENT._replace(is_sampled=False)

    async def scenario(app: Starlette, fleet: Bench, told: list[Span]) -> None:
        assert (await chat(app, unwanted.header)).status == 200
        assert told == []
        assert {request.traceparent for engine in fleet.engines for request in engine.requests} == {unwanted.header}

    run(folder, scenario)


def test_a_refusal_and_a_failure_are_told(folder: Path) -> None:
    async def scenario(app: Starlette, fleet: Bench, told: list[Span]) -> None:
        assert (await chat(app, temperature=9)).status == 400
        assert hops(told)["frontend"].attributes["fourhop.outcome"] == "refused" and "router" not in hops(told)
        told.clear()
        for engine in fleet.engines:
            engine.faults = [Fault(0, PeerError("broken")) for _ in range(9)]
        assert (await chat(app)).status >= 500
        assert [hops(told)[tier].has_failed for tier in ("frontend", "router")] == [True, True]
        assert hops(told)["router"].attributes["fourhop.outcome"] == "failed"

    run(folder, scenario, max_retries=0)


def test_an_engine_tells_of_itself() -> None:
    async def scenario() -> None:
        told: list[Span] = []
        engine = StubEngine("e")
        server = traced(engine, Tracer("engine", told.append))
        app = create_app(
            routes=token_routes(server, abort=engine.abort), config=ServerConfig(), registry=CollectorRegistry()
        )
        async with serving(app) as url, open_session() as session:
            upstream = Upstream(url, session, timeouts=Timeouts())
            request = GenerateRequest(
                token_ids=[1, 2], sampling_params=SamplingParams(max_tokens=3), traceparent=CLIENT.header
            )
            async for _ in upstream.generate(request):
                pass
        span = hops(told)["engine"]
        assert span.parent == CLIENT and parse_traceparent(engine.requests[0].traceparent) == span.context
        assert span.attributes["gen_ai.usage.completion_tokens"] == 3
        assert (span.attributes["fourhop.outcome"], span.attributes["fourhop.finish"]) == ("finished", "length")

    asyncio.run(scenario())


def test_who_leaves_early_is_told_of_as_cancelled() -> None:
    async def scenario() -> None:
        told: list[Span] = []
        server = traced(StubEngine("e"), Tracer("engine", told.append))
        chunks = server.generate(GenerateRequest(token_ids=[1], sampling_params=SamplingParams(max_tokens=9)))
        await anext(chunks)
        await chunks.aclose()
        assert hops(told)["engine"].attributes["fourhop.outcome"] == "cancelled"

    asyncio.run(scenario())


def test_the_moments_of_a_hand_over_are_those_of_its_intervals() -> None:
    async def scenario() -> None:
        async with toy_fleet(1, 1) as fleet:
            params = SamplingParams(max_tokens=6, temperature=0.0)
            request = GenerateRequest(token_ids=list(range(20, 40)), sampling_params=params)
            moments: dict[str, float] = {}
            async for chunk in fleet.router.generate(request):
                moments = chunk.moments or moments
            told = {interval.name: interval for interval in intervals(moments)}
            assert set(told) >= {"queue", "placement", "prefill", "transfer", "decode_wait", "decode"}
            assert told["transfer"].end_s == told["decode_wait"].begin_s <= told["decode_wait"].end_s
            await fleet.settle()

    asyncio.run(scenario())


@pytest.mark.parametrize("holds", [False, True])
def test_a_stock_vllm_gets_the_header(holds: bool) -> None:
    async def scenario() -> None:
        engine = StockVLLM("e")
        async with serving(engine.app()) as url, open_session() as session:
            server = VLLMTokenServer(url, session, timeouts=Timeouts())
            request = GenerateRequest(
                token_ids=[1, 2],
                sampling_params=SamplingParams(max_tokens=2, prompt_logprobs=1 if holds else None),
                request_id="r",
                traceparent=CLIENT.header,
            )
            async for _ in server.generate(request):
                pass
        assert engine.traceparents == [CLIENT.header]

    asyncio.run(scenario())
