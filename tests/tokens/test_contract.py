"""The TokenServer contract, held by a stub engine in process and by a remote one over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from contracts.token_server import CHECKS, Check, Subject, run_check
from fakes.serving import serving
from fakes.stub_engine import StubEngine
from fourhop.service import ServerConfig, create_app
from fourhop.tokens.client import RemoteTokenServer
from fourhop.tokens.connection import open_session
from fourhop.tokens.routes import token_routes

PROMPT = [10, 11, 12, 13, 14]


@asynccontextmanager
async def in_process() -> AsyncIterator[Subject]:
    engine = StubEngine("engine")
    yield Subject(engine, PROMPT, engine.is_idle)


@asynccontextmanager
async def over_http() -> AsyncIterator[Subject]:
    engine = StubEngine("engine")
    routes = token_routes(engine, abort=engine.abort, models=["toy"])
    app = create_app(routes=routes, config=ServerConfig(), registry=CollectorRegistry())
    async with serving(app) as url, open_session() as session:
        yield Subject(RemoteTokenServer(url, session), PROMPT, engine.is_idle)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_stub_engine_keeps_the_contract(check: Check) -> None:
    asyncio.run(run_check(check, in_process))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_remote_token_server_keeps_the_contract(check: Check) -> None:
    asyncio.run(run_check(check, over_http))
