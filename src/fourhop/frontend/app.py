"""The frontend's HTTP app: OpenAI's endpoints in front of a token server, and the scale-out ones beside them.

Without a token server it renders and derenders only.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fourhop.checkpoint import Checkpoint
from fourhop.frontend.chat import Chat
from fourhop.frontend.completions import Completion
from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.dialects import dialect_routes
from fourhop.frontend.load import load_renderer
from fourhop.frontend.metrics import FrontendMetrics
from fourhop.frontend.openapi import openapi_route
from fourhop.frontend.pipeline import Pipeline, new_id, respond
from fourhop.frontend.render import COMPLETION_ID
from fourhop.frontend.text_routes import text_routes
from fourhop.frontend.workers import RenderWorkers, beside
from fourhop.service import ServerConfig, create_app, json_response, read_body
from fourhop.service.tracing import Tracer
from fourhop.tokens.server import TokenServer
from fourhop.wire.openai_chat import ChatCompletionRequest
from fourhop.wire.openai_completion import CompletionRequest

Health = Callable[[], Awaitable[str | None]]
Resources = Callable[[], AbstractAsyncContextManager[None]]


def create(
    config: FrontendConfig,
    checkpoint: Checkpoint,
    server_config: ServerConfig,
    upstream: TokenServer | None = None,
    *,
    health: Health | None = None,
    details: Callable[[], Mapping[str, object]] = dict,
    routes: Sequence[BaseRoute] = (),
    resources: Resources = nullcontext,
    registry: CollectorRegistry | None = None,
    tracer: Tracer | None = None,
    clock: Callable[[], float] = time.monotonic,
    now_s: Callable[[], float] = time.time,
) -> Starlette:
    """The app of a frontend for `checkpoint`. Raises StartError when the checkpoint's text files cannot be used.

    `health` tells why the token server cannot serve, or None when it can; `details` is shown beside it. `routes` are
    served as well; `resources` is entered before the first request and left after the last. `now_s` is Unix time.
    """
    registry = registry or CollectorRegistry()
    renderer = load_renderer(checkpoint, config)
    metrics = FrontendMetrics(registry)
    workers = RenderWorkers(config.num_render_workers, metrics.render_waiting, max_waiting=config.max_render_waiting)
    pipeline = Pipeline(renderer, upstream, workers, metrics, clock, now_s, tracer)
    frontend = Frontend(pipeline)

    def quicken(stopped: Callable[[], bool]) -> None:
        if not renderer.tokenizer.quicken(stopped) and not stopped():
            metrics.fallbacks.note("slow_tokenizer", f"no fast encoder is proven equal for {renderer.model.name}")

    @asynccontextmanager
    async def everything() -> AsyncIterator[None]:
        async with resources():
            try:
                with beside(quicken):
                    yield
            finally:
                workers.close()

    own = [
        Route("/v1/chat/completions", frontend.chat, methods=["POST"]),
        Route("/v1/completions", frontend.completion, methods=["POST"]),
        Route("/health", _health_route(health, details)),
        *dialect_routes(pipeline),
        *text_routes(pipeline),
        openapi_route(),
    ]
    return create_app(routes=[*own, *routes], config=server_config, registry=registry, resources=everything)


@dataclass(frozen=True)
class Frontend:
    """OpenAI's two endpoints that generate."""

    pipeline: Pipeline

    async def chat(self, request: Request) -> Response:
        life = self.pipeline.life("chat", request)
        with life.watch():
            body = await read_body(request, ChatCompletionRequest)
            generation = await self.pipeline.chat(request, life, body, new_id(request, body.request_id))
            chat = Chat(
                request=body,
                generation=generation,
                life=life,
                model=self.pipeline.renderer.model.name,
                created=int(self.pipeline.now_s()),
                counts_reasoning=self.pipeline.renderer.parsers.has_reasoning,
            )
        return await respond(request, chat, life, stream=bool(body.stream))

    async def completion(self, request: Request) -> Response:
        life = self.pipeline.life("completion", request)
        with life.watch():
            body = await read_body(request, CompletionRequest)
            generations = await self.pipeline.completion(request, life, body, new_id(request, body.request_id))
            completion = Completion(
                request=body,
                request_id=f"{COMPLETION_ID}{life.request_id}",
                generations=generations,
                life=life,
                model=self.pipeline.renderer.model.name,
                created=int(self.pipeline.now_s()),
            )
        return await respond(request, completion, life, stream=bool(body.stream))


def _health_route(
    health: Health | None, details: Callable[[], Mapping[str, object]]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        reason = None if health is None else await health()
        if reason is not None:
            return json_response({"status": "unavailable", "reason": reason, **details()}, status=503)
        return json_response({"status": "ok", **details()})

    return endpoint
