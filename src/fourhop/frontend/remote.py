"""A frontend whose text is done elsewhere (`--render-url`): by the render and derender endpoints of a vLLM or of ours.

It knows no tokenizer and no template. A chat is rendered with one call, answered by the token server, and derendered:
with one call if it is whole, with one for each chunk of a stream, whose state travels to and fro (vLLM 0.32).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fourhop.frontend.app import Health
from fourhop.service import (
    ServerConfig,
    create_app,
    json_response,
    read_body,
    request_id,
    stream_response,
    traceparent,
    until_disconnect,
)
from fourhop.tokens.client import id_header
from fourhop.tokens.connection import Session, Timeouts, call, request_headers
from fourhop.tokens.refusal import Entry
from fourhop.tokens.server import TokenServer, collect
from fourhop.wire import sse
from fourhop.wire.errors import ClientError, PeerError, client_error
from fourhop.wire.generate import GenerateChunk, GenerateRequest, Targets

T = TypeVar("T")
Body = dict[str, Any]

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class TextServer:
    """Who renders and derenders."""

    url: str
    session: Session
    timeouts: Timeouts
    api_key: str | None = None

    async def ask(self, path: str, body: object, kind: type[T], name: str = "") -> T:
        """Raises PeerRefused with the server's own refusal, PeerTimeout or PeerError."""
        return self._decode(await self.fetch("POST", path, msgspec.json.encode(body), name), kind, path)

    async def fetch(self, method: str, path: str, body: bytes = b"", name: str = "") -> bytes:
        headers = request_headers(self.api_key) | id_header(name)
        url = self.url.rstrip("/") + path
        entry = Entry(self.url)
        async with call(
            self.session, method, url, timeouts=self.timeouts, body=body, headers=headers, entry=entry
        ) as answer:
            return await answer.read_all()

    def _decode(self, data: bytes, kind: type[T], path: str) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            raise PeerError(f"{self.url}{path} answered with what is no answer: {error}") from None


@dataclass(frozen=True)
class Endpoint:
    """One of the two endpoints that generate: where it is rendered, and how its request and its answers are called."""

    path: str
    original: str
    is_list: bool

    async def render(self, text: TextServer, body: Body, name: str) -> GenerateRequest:
        """The request as the token server takes it. Raises ClientError."""
        path = self.path + "/render"
        if not self.is_list:
            return with_targets(cleaned(await text.ask(path, body, GenerateRequest, name)), body)
        rendered = await text.ask(path, body, list[GenerateRequest], name)
        if len(rendered) != 1:
            raise ClientError("prompt: one at a time where text is rendered elsewhere", param="prompt")
        return with_targets(cleaned(rendered[0]), body)

    def whole(self, body: Body, request: GenerateRequest, answer: object) -> Body:
        """What is asked to derender a whole answer."""
        asked: Body = {"stream": False, "model": body.get("model"), self.original: body}
        num_prompt = len(request.token_ids)
        if self.is_list:
            of_prompt: Body = {"prompt_tokens": [num_prompt], "prompt_token_ids": [request.token_ids]}
            return asked | of_prompt | {"generate_responses": [answer]}
        of_prompt = {"prompt_tokens": num_prompt, "prompt_token_ids": request.token_ids}
        return asked | of_prompt | {"generate_response": answer}

    def part(self, body: Body, request: GenerateRequest, chunk: GenerateChunk, state: object) -> Body:
        """What is asked to derender one chunk of a stream."""
        return {
            "stream": True,
            "model": body.get("model"),
            "generate_chunk": {
                "request_id": request.request_id,
                "choices": chunk.choices,
                "usage": chunk.usage,
                "output_mode": "tokens",
            },
            "stream_state": state,
            "prompt_tokens": len(request.token_ids),
            "prompt_token_ids": request.token_ids,
            self.original: body,
        }


CHAT = Endpoint(CHAT_PATH, "chat_request", is_list=False)
COMPLETION = Endpoint(COMPLETION_PATH, "completion_request", is_list=True)


class _Derendered(msgspec.Struct):
    chunk: msgspec.Raw
    stream_state: msgspec.Raw


def cleaned(request: GenerateRequest) -> GenerateRequest:
    """A rendered request without what only steers the renderer's own engine. Raises ClientError."""
    params = request.sampling_params
    if request.kv_transfer_params is not None or "kv_transfer_params" in (params.extra_args or {}):
        raise ClientError("kv_transfer_params: transfers are the router's own affair", param="kv_transfer_params")
    structure = {
        name: value
        for name, value in (params.structured_outputs or {}).items()
        if value is not None and not name.startswith("_")
    }
    params = msgspec.structs.replace(params, structured_outputs=structure or None)
    return msgspec.structs.replace(request, sampling_params=params)


def with_targets(request: GenerateRequest, body: Body) -> GenerateRequest:
    """A rendered request with the client's targets, which a stock vLLM reads over. Raises ClientError."""
    try:
        return msgspec.structs.replace(request, targets=msgspec.convert(body.get("targets"), Targets | None))
    except msgspec.ValidationError as error:
        raise client_error(error, "targets") from None


@dataclass(frozen=True)
class RemoteFrontend:
    """OpenAI's two endpoints over a text server and a token server."""

    text: TextServer
    tokens: TokenServer
    now_s: Callable[[], float] = time.time

    def route(self, endpoint: Endpoint) -> Route:
        async def answer(request: Request) -> Response:
            body: Body = await read_body(request, dict)
            rendered = await until_disconnect(request, endpoint.render(self.text, body, request_id(request)))
            rendered = msgspec.structs.replace(rendered, traceparent=traceparent(request))
            if body.get("stream"):
                return await stream_response(self._events(endpoint, body, rendered))
            return await until_disconnect(request, self._whole(endpoint, body, rendered))

        return Route(endpoint.path, answer, methods=["POST"])

    async def models(self, request: Request) -> Response:
        return Response(await self.text.fetch("GET", "/v1/models"), media_type="application/json")

    async def _whole(self, endpoint: Endpoint, body: Body, request: GenerateRequest) -> Response:
        answer = await collect(self.tokens.generate(request), model=body.get("model"), created=int(self.now_s()))
        named = msgspec.structs.replace(answer, request_id=request.request_id)
        told = await self.text.ask(endpoint.path + "/derender", endpoint.whole(body, request, named), msgspec.Raw)
        return Response(bytes(told), media_type="application/json")

    async def _events(self, endpoint: Endpoint, body: Body, request: GenerateRequest) -> AsyncIterator[bytes]:
        """The stream as server-sent events; each choice has its own state."""
        states: dict[int, msgspec.Raw] = {}
        wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        async with aclosing(self.tokens.generate(request)) as chunks:
            async for chunk in chunks:
                if not chunk.choices and not wants_usage:
                    continue
                index = chunk.choices[0].index if chunk.choices else -1
                asked = endpoint.part(body, request, chunk, states.get(index))
                told = await self.text.ask(endpoint.path + "/derender", asked, _Derendered)
                states[index] = told.stream_state
                yield sse.encode_event(bytes(told.chunk))
        yield sse.DONE_EVENT


def create(
    frontend: RemoteFrontend, server: ServerConfig, health: Health, registry: CollectorRegistry | None = None
) -> Starlette:
    """The app of a frontend without text. `health` tells why tokens cannot be had, or None."""

    async def well(request: Request) -> Response:
        reason = await health()
        if reason is None:
            await frontend.text.fetch("GET", "/health")
            return json_response({"status": "ok"})
        return json_response({"status": "unavailable", "reason": reason}, status=503)

    routes = [
        frontend.route(CHAT),
        frontend.route(COMPLETION),
        Route("/v1/models", frontend.models),
        Route("/health", well),
    ]
    return create_app(routes=routes, config=server, registry=registry or CollectorRegistry())
