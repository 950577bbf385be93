"""The TokenServer contract, held by a router: split, whole on one engine, and over two of each kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contracts.token_server import CHECKS, Check, Subject, run_check
from fakes.fleet import bench
from fakes.serving import serving
from fakes.stub_engine import StubEngine
from fourhop.router.app import Router
from fourhop.router.config import GoodputConfig, PlacementMode, RouterConfig
from fourhop.service import ServerConfig, create_app, json_response
from fourhop.tokens.client import RemoteTokenServer
from fourhop.tokens.connection import open_session
from fourhop.tokens.routes import token_routes

PROMPT = [10, 11, 12, 13, 14]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (2, 2), (1, 0), (0, 1)])
def test_router_keeps_the_contract(check: Check, num_prefill: int, num_decode: int) -> None:
    @asynccontextmanager
    async def open_subject() -> AsyncIterator[Subject]:
        async with bench(num_prefill, num_decode) as one:
            yield Subject(one.router, PROMPT, one.is_idle)

    asyncio.run(run_check(check, open_subject))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("placement", ["auto", "local"])
def test_router_keeps_the_contract_with_targets_and_any_placement(check: Check, placement: PlacementMode) -> None:
    goodput = GoodputConfig(placement=placement, ttft_ms=60_000.0, itl_ms=10_000.0, max_queued=50)

    @asynccontextmanager
    async def open_subject() -> AsyncIterator[Subject]:
        async with bench(2, 2, goodput=goodput) as one:
            yield Subject(one.router, PROMPT, one.is_idle)

    asyncio.run(run_check(check, open_subject))


def engine_app(engine: StubEngine) -> Starlette:
    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def worker(request: Request) -> Response:
        return json_response(engine.info())

    routes = [*token_routes(engine, abort=engine.abort), Route("/health", health), Route("/worker", worker)]
    return create_app(routes=routes, config=ServerConfig(), registry=CollectorRegistry())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_router_keeps_the_contract_over_real_connections(check: Check) -> None:
    """Client, router and both engines, each behind a socket."""

    @asynccontextmanager
    async def open_subject() -> AsyncIterator[Subject]:
        prefill, decode = StubEngine("p", role="prefill"), StubEngine("d", role="decode")
        prefill.peers = decode.peers = {"p": prefill, "d": decode}
        async with serving(engine_app(prefill)) as p_url, serving(engine_app(decode)) as d_url:
            registry = CollectorRegistry()
            router = Router(RouterConfig((p_url,), (d_url,)), registry=registry, wall_clock=lambda: prefill.now_s)
            app = create_app(
                routes=token_routes(router, abort=router.abort),
                config=ServerConfig(),
                registry=registry,
                resources=router.running,
            )
            async with serving(app) as url, open_session() as session:
                yield Subject(
                    RemoteTokenServer(url, session),
                    PROMPT,
                    lambda: prefill.is_idle() and decode.is_idle() and not router.ledger.owed,
                )

    asyncio.run(run_check(check, open_subject))
