"""Targets and priorities come through every API, are checked there, and are kept or refused by who serves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from fakes.asgi import post
from fakes.fleet import bench
from fakes.serving import serving
from fakes.stock_vllm import StockVLLM
from fakes.stub_engine import StubEngine
from fakes.token_server import ScriptedTokenServer
from fakes.toy import write_toy_checkpoint
from fourhop.checkpoint import Checkpoint
from fourhop.frontend.app import create
from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.remote import with_targets
from fourhop.router.routes import router_routes
from fourhop.service import ServerConfig, create_app
from fourhop.tokens.connection import Timeouts, open_session
from fourhop.tokens.server import TokenServer
from fourhop.tokens.upstream import Upstream
from fourhop.wire.errors import ClientError, Unavailable
from fourhop.wire.generate import GenerateRequest, SamplingParams, Targets

USER: list[Any] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
}
TARGETS = {"ttft_ms": 500, "itl_ms": 50.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"))


def app_of(folder: Path, upstream: TokenServer | None) -> Starlette:
    return create(FrontendConfig(), Checkpoint("toy", folder), ServerConfig(), upstream)


async def send(app: Starlette, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    exchange = await post(path, json.dumps(body).encode()).run(app)
    return exchange.status, json.loads(exchange.content)


@pytest.mark.parametrize("path", BODIES)
def test_every_api_takes_them_and_renders_them(folder: Path, path: str) -> None:
    upstream = ScriptedTokenServer([[72], [105]])
    app, body = app_of(folder, upstream), BODIES[path] | {"targets": TARGETS, "priority": -2}
    status, answer = asyncio.run(send(app, path, body))
    assert status == 200, answer
    assert (upstream.requests[0].targets, upstream.requests[0].priority) == (Targets(500, 50.5), -2)
    status, rendered = asyncio.run(send(app, f"{path}/render", body))
    first = rendered[0] if isinstance(rendered, list) else rendered
    assert (status, first["targets"], first["priority"]) == (200, TARGETS, -2)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("targets", "param"),
    [
        ({"ttft_ms": 0}, "targets.ttft_ms"),
        ({"itl_ms": -1}, "targets.itl_ms"),
        ({"ttft_ms": 1e12}, "targets.ttft_ms"),
        ({"itl_ms": "fast"}, "targets.itl_ms"),
        ({"tpot_ms": 5}, "targets"),
        ([], "targets"),
    ],
)
def test_what_is_no_target_is_refused_by_path(folder: Path, path: str, targets: Any, param: str) -> None:
    upstream = ScriptedTokenServer([[72]])
    status, answer = asyncio.run(send(app_of(folder, upstream), path, BODIES[path] | {"targets": targets}))
    assert status == 400 and upstream.requests == []
    assert "param" not in answer["error"] or answer["error"]["param"] == param


@pytest.mark.parametrize("path", BODIES)
def test_an_engine_refuses_them(folder: Path, path: str) -> None:
    status, answer = asyncio.run(send(app_of(folder, StubEngine("e")), path, BODIES[path] | {"targets": TARGETS}))
    assert status == 400 and "targets are not supported" in answer["error"]["message"]


def test_a_router_behind_a_connection_keeps_them(folder: Path) -> None:
    async def scenario() -> None:
        async with bench() as fleet:
            routes = router_routes(fleet.router)
            tokens = create_app(routes=routes, config=ServerConfig(), registry=CollectorRegistry())
            async with serving(tokens) as url, open_session() as session:
                app = app_of(folder, Upstream(url, session, timeouts=Timeouts()))
                for path, body in BODIES.items():
                    status, answer = await send(app, path, body | {"targets": TARGETS, "priority": 3})
                    assert status == 200, answer
            assert fleet.count("fourhop_router_requests_total", outcome="finished") == len(BODIES)
            assert all(request.targets is None for engine in fleet.engines for request in engine.requests)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_stock_vllm_reads_over_them_so_they_are_refused(is_plain: bool) -> None:
    async def scenario() -> None:
        engine = StockVLLM("e")
        async with serving(engine.plain_app() if is_plain else engine.app()) as url, open_session() as session:
            upstream = Upstream(url, session, timeouts=Timeouts())
            params = SamplingParams(max_tokens=3)
            request = GenerateRequest(
                token_ids=[1, 2], sampling_params=params, request_id="r", targets=Targets(itl_ms=5)
            )
            with pytest.raises(ClientError) as caught:
                async for _ in upstream.generate(request):
                    raise AssertionError("a token that nobody kept in time")
            assert caught.value.param == "targets"

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_hears_when_to_come_again(folder: Path, stream: bool) -> None:
    late = Unavailable("the first token could not be in time; come again later", retry_after_s=7.0)
    app = app_of(folder, ScriptedTokenServer([[72]], stop_before=0, error=late))

    async def scenario() -> None:
        async with (
            httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as http,
            AsyncOpenAI(base_url="http://toy/v1", api_key="none", http_client=http, max_retries=0) as client,
        ):
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(
                    model="toy", messages=USER, stream=stream, extra_body={"targets": TARGETS}
                )
            assert caught.value.status_code == 503
            assert caught.value.response.headers["retry-after"] == "7"

    asyncio.run(scenario())


def test_targets_that_another_renderer_read_over_are_added() -> None:
    request = GenerateRequest(token_ids=[1], sampling_params=SamplingParams())
    assert with_targets(request, {"targets": TARGETS}).targets == Targets(500, 50.5)
    assert with_targets(request, {}).targets is None
    with pytest.raises(ClientError) as caught:
        with_targets(request, {"targets": {"ttft_ms": -1}})
    assert caught.value.param == "targets.ttft_ms"
