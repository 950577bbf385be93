"""The router's own key is wrong at an engine: no client is told that its key is, and the engine is out meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from contracts.token_server import chunks_of, tokens_of
from fakes.engines import toy_engine
from fakes.serving import serving
from fakes.stock_vllm import StockVLLM
from fourhop.engine.app import create
from fourhop.router.app import Router
from fourhop.router.config import RouterConfig
from fourhop.router.worker import Worker
from fourhop.service import ServerConfig
from fourhop.wire.errors import FourhopError
from fourhop.wire.generate import GenerateRequest, SamplingParams

REFUSED = "does not take the key of the server that calls it (status {}): see --upstream-api-key"


@dataclass
class Door:
    """Lets in who has the key, as a vLLM does with 401, or as a gateway does with 403 and a page of its own."""

    app: ASGIApp
    key: str
    status: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_guarded = scope["type"] == "http" and scope["path"].startswith(("/v1/", "/inference/", "/kv/"))
        if is_guarded and (b"authorization", f"Bearer {self.key}".encode()) not in scope["headers"]:
            await JSONResponse({"error": "Unauthorized"}, self.status)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


@dataclass
class Locked:
    """A router, and the one engine that it has."""

    router: Router
    worker: Worker
    door: Door

    async def look(self) -> str | None:
        self.worker.retry_at_s = 0.0
        await self.router.fleet.look(self.worker)
        return self.worker.down

    async def ask(self) -> list[int]:
        params = SamplingParams(max_tokens=3, temperature=0.0)
        request = GenerateRequest(token_ids=[20, 21, 22], sampling_params=params, request_id="r")
        return tokens_of(await chunks_of(self.router, request))

    async def failure(self) -> FourhopError:
        try:
            await self.ask()
        except FourhopError as error:
            return error
        raise AssertionError("it was served")


@asynccontextmanager
async def locked(kind: str, status: int, key: str) -> AsyncIterator[Locked]:
    async with AsyncExitStack() as stack:
        stock = StockVLLM("e")
        if kind == "ours":
            app: ASGIApp = create(await stack.enter_async_context(toy_engine(num_blocks=32)), ServerConfig())
        else:
            app = stock.app() if kind == "stock" else stock.plain_app()
        door = Door(app, key, status)
        url = await stack.enter_async_context(serving(door))
        router = Router(RouterConfig((url,), upstream_api_key="ours"), registry=CollectorRegistry())

        async def never(seconds: float) -> None:
            await asyncio.Event().wait()

        router.fleet.sleep = never
        await stack.enter_async_context(router.running())
        yield Locked(router, router.fleet.workers[url], door)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("kind", ["ours", "stock", "plain"])
def test_a_wrong_key_from_the_beginning(kind: str, status: int) -> None:
    async def scenario() -> None:
        async with locked(kind, status, "another") as one:
            assert one.worker.down is not None and REFUSED.format(status) in one.worker.down
            failure = await one.failure()
            assert failure.status == 503 and REFUSED.format(status) in failure.message
            one.door.key = "ours"
            assert await one.look() is None
            assert len(await one.ask()) == 3

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["ours", "stock", "plain"])
def test_a_key_that_is_changed_while_the_engine_serves(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def scenario() -> None:
        async with locked(kind, 401, "ours") as one:
            assert len(await one.ask()) == 3
            one.door.key = "another"
            failure = await one.failure()
            assert (failure.status, failure.type, failure.param) == (502, "BadGatewayError", None)
            assert failure.message == f"{one.worker.name} {REFUSED.format(401)}"
            for _ in range(3):
                assert await one.look() == failure.message
            assert sum("is down" in record.message for record in caplog.records) == 1
            story = one.router.history.find("r")
            assert any(REFUSED.format(401) in step.what for step in story.steps)
            one.door.key = "ours"
            assert await one.look() is None
            assert len(await one.ask()) == 3

    asyncio.run(scenario())
