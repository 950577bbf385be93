"""From a request to its generation, whichever API it came through: render in a worker, then the token server."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from fourhop.frontend.context import chat_context, completion_context
from fourhop.frontend.generation import Generation
from fourhop.frontend.life import Life
from fourhop.frontend.metrics import FrontendMetrics
from fourhop.frontend.names import chat_names, completion_names
from fourhop.frontend.render import Renderer
from fourhop.frontend.workers import RenderWorkers
from fourhop.service import json_response, request_id, stream_response, traceparent, until_disconnect
from fourhop.service.requests import MAX_REQUEST_ID_CHARS
from fourhop.service.tracing import Tracer
from fourhop.tokens.server import TokenServer
from fourhop.wire.errors import FourhopError, Unavailable
from fourhop.wire.openai_chat import ChatCompletionRequest
from fourhop.wire.openai_completion import CompletionRequest


@dataclass(frozen=True)
class Pipeline:
    """What every endpoint that generates needs. `now_s` is Unix time."""

    renderer: Renderer
    upstream: TokenServer | None
    workers: RenderWorkers
    metrics: FrontendMetrics
    clock: Callable[[], float]
    now_s: Callable[[], float]
    tracer: Tracer | None = None

    def life(self, kind: str, request: Request) -> Life:
        given = traceparent(request)
        hop = None if self.tracer is None else self.tracer.begin(given)
        life = Life(kind, self.metrics, self.clock, hop=hop, traceparent=given)
        life.request_id = request_id(request)
        return life

    async def chat(self, request: Request, life: Life, body: ChatCompletionRequest, name: str) -> Generation:
        """The generation of a chat request, not yet begun. Raises FourhopError or ClientDisconnect."""
        upstream = self._upstream()
        life.request_id = name
        rendered = await self.workers.run_for(request, self.renderer.chat, body, name)
        life.rendered([rendered])
        context = chat_context(
            body,
            rendered.token_ids,
            self.renderer.tokenizer,
            self.renderer.parsers,
            eos_token_ids=self.renderer.model.eos_token_ids,
            request_id=rendered.request_id,
        )
        return Generation(upstream, rendered, context, life, names=chat_names(body))

    async def completion(self, request: Request, life: Life, body: CompletionRequest, name: str) -> list[Generation]:
        """As `chat`, one generation for each prompt."""
        upstream = self._upstream()
        life.request_id = name
        rendered = await self.workers.run_for(request, self.renderer.completion, body, name)
        life.rendered(rendered)
        generations = []
        for index, prompt in enumerate(rendered):
            context = completion_context(
                body, prompt.token_ids, self.renderer.tokenizer, eos_token_ids=self.renderer.model.eos_token_ids
            )
            names = completion_names(body, "prompt")
            first = index * prompt.sampling_params.n
            generations.append(Generation(upstream, prompt, context, life, names=names, first_index=first))
        return generations

    def _upstream(self) -> TokenServer:
        if self.upstream is None:
            raise Unavailable(
                "this frontend only renders and derenders; start it with --upstream URL of a router or an engine"
            )
        return self.upstream


class Answer(Protocol):
    """A generation in the shape of one API."""

    async def whole(self) -> object: ...

    def events(self) -> AsyncGenerator[bytes, None]: ...


async def respond(
    request: Request,
    answer: Answer,
    life: Life,
    *,
    stream: bool,
    failure: Callable[[FourhopError], bytes] | None = None,
) -> Response:
    """The answer as a stream or in one piece. `failure` makes the last event of a stream that failed."""
    if stream:
        return await stream_response(answer.events(), headers=life.headers, failure=failure)
    return json_response(await until_disconnect(request, answer.whole()), headers=life.headers())


def new_id(request: Request, named: str | None) -> str:
    """The id of a request: the client's header, else the body's, else a random one."""
    printable = "".join(c for c in (named or "")[: 4 * MAX_REQUEST_ID_CHARS] if "!" <= c <= "~")
    return request_id(request) or printable[:MAX_REQUEST_ID_CHARS] or secrets.token_hex(16)
