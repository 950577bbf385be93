"""The frontend's HTTP app: OpenAI's endpoints in front of a token server, and the scale-out ones beside them.

Without a token server it renders and derenders only.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from threading import Thread

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fourhop.checkpoint import Checkpoint
from fourhop.frontend.chat import Chat
from fourhop.frontend.completions import Completion
from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.context import chat_context, completion_context
from fourhop.frontend.generation import Generation
from fourhop.frontend.life import Life
from fourhop.frontend.load import load_renderer
from fourhop.frontend.metrics import FrontendMetrics
from fourhop.frontend.render import Renderer, chat_names, completion_names
from fourhop.frontend.text_routes import text_routes
from fourhop.frontend.workers import RenderWorkers
from fourhop.service import (
    ServerConfig,
    create_app,
    json_response,
    read_body,
    request_id,
    stream_response,
    until_disconnect,
)
from fourhop.service.requests import MAX_REQUEST_ID_CHARS
from fourhop.tokens.server import TokenServer
from fourhop.wire.errors import Unavailable
from fourhop.wire.openai import SamplingRequest
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
    routes: Sequence[BaseRoute] = (),
    resources: Resources = nullcontext,
    registry: CollectorRegistry | None = None,
    clock: Callable[[], float] = time.monotonic,
    now_s: Callable[[], float] = time.time,
) -> Starlette:
    """The app of a frontend for `checkpoint`. Raises StartError when the checkpoint's text files cannot be used.

    `health` tells why the token server cannot serve, or None when it can. `routes` are served as well; `resources`
    is entered before the first request and left after the last. `now_s` is Unix time.
    """
    registry = registry or CollectorRegistry()
    renderer = load_renderer(checkpoint, config)
    metrics = FrontendMetrics(registry)
    workers = RenderWorkers(config.num_render_workers, metrics.render_waiting)
    frontend = Frontend(renderer, upstream, workers, metrics, clock, now_s)

    @asynccontextmanager
    async def everything() -> AsyncIterator[None]:
        async with resources():
            Thread(target=renderer.tokenizer.quicken, name="quicken", daemon=True).start()
            try:
                yield
            finally:
                workers.close()

    own = [
        Route("/v1/chat/completions", frontend.chat, methods=["POST"]),
        Route("/v1/completions", frontend.completion, methods=["POST"]),
        Route("/health", _health_route(health)),
        *text_routes(renderer, workers, now_s, new_id=new_id),
    ]
    return create_app(routes=[*own, *routes], config=server_config, registry=registry, resources=everything)


@dataclass(frozen=True)
class Frontend:
    """The two endpoints that generate."""

    renderer: Renderer
    upstream: TokenServer | None
    workers: RenderWorkers
    metrics: FrontendMetrics
    clock: Callable[[], float]
    now_s: Callable[[], float]

    async def chat(self, request: Request) -> Response:
        life = self._life("chat", request)
        with life.watch():
            upstream = self._upstream()
            body = await read_body(request, ChatCompletionRequest)
            life.request_id = new_id(request, body)
            rendered = await self.workers.run(self.renderer.chat, body, life.request_id)
            life.rendered([rendered])
            context = chat_context(
                body,
                rendered.token_ids,
                self.renderer.tokenizer,
                self.renderer.parsers,
                eos_token_ids=self.renderer.model.eos_token_ids,
                request_id=rendered.request_id,
            )
            chat = Chat(
                request=body,
                generation=Generation(upstream, rendered, context, life, names=chat_names(body)),
                life=life,
                model=self.renderer.model.name,
                created=int(self.now_s()),
                counts_reasoning=self.renderer.parsers.has_reasoning,
            )
        if body.stream:
            return await stream_response(chat.events(), headers=life.headers)
        return json_response(await until_disconnect(request, chat.whole()), headers=life.headers())

    async def completion(self, request: Request) -> Response:
        life = self._life("completion", request)
        with life.watch():
            upstream = self._upstream()
            body = await read_body(request, CompletionRequest)
            life.request_id = new_id(request, body)
            rendered = await self.workers.run(self.renderer.completion, body, life.request_id)
            life.rendered(rendered)
            generations = []
            for index, prompt in enumerate(rendered):
                context = completion_context(
                    body,
                    prompt.token_ids,
                    self.renderer.tokenizer,
                    eos_token_ids=self.renderer.model.eos_token_ids,
                )
                names = completion_names(body, "prompt")
                first = index * prompt.sampling_params.n
                generations.append(Generation(upstream, prompt, context, life, names=names, first_index=first))
            completion = Completion(
                request=body,
                request_id=f"cmpl-{life.request_id}",
                generations=generations,
                prompt_texts=[self.renderer.tokenizer.decode(r.token_ids) for r in rendered] if body.echo else [],
                life=life,
                model=self.renderer.model.name,
                created=int(self.now_s()),
            )
        if body.stream:
            return await stream_response(completion.events(), headers=life.headers)
        return json_response(await until_disconnect(request, completion.whole()), headers=life.headers())

    def _life(self, kind: str, request: Request) -> Life:
        life = Life(kind, self.metrics, self.clock)
        life.request_id = request_id(request)
        return life

    def _upstream(self) -> TokenServer:
        if self.upstream is None:
            raise Unavailable(
                "this frontend only renders and derenders; start it with --upstream URL of a router or an engine"
            )
        return self.upstream


def new_id(request: Request, body: SamplingRequest) -> str:
    """The id of a request: the client's header, else the body's, else a random one."""
    named = body.request_id or ""
    printable = "".join(c for c in named[: 4 * MAX_REQUEST_ID_CHARS] if "!" <= c <= "~")
    return request_id(request) or printable[:MAX_REQUEST_ID_CHARS] or secrets.token_hex(16)


def _health_route(health: Health | None) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        reason = None if health is None else await health()
        if reason is not None:
            return json_response({"status": "unavailable", "reason": reason}, status=503)
        return json_response({"status": "ok"})

    return endpoint
