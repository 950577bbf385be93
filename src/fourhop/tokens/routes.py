"""A TokenServer's endpoints: `/inference/v1/generate` and `/inference/v1/abort_requests`, as vLLM 0.32 has them."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fourhop.service import json_response, read_body, request_id, stream_response, traceparent, until_disconnect
from fourhop.tokens.dialect import GENERATE_PATH
from fourhop.tokens.limits import check_supported
from fourhop.tokens.server import TokenServer, collect
from fourhop.tokens.worker import ABORT_PATH, ID_PREFIX
from fourhop.wire import sse
from fourhop.wire.errors import ClientError, NotFound
from fourhop.wire.generate import AbortRequest, GenerateChunk, GenerateRequest, Usage
from fourhop.wire.moments import server_timing

Abort = Callable[[list[str]], Awaitable[None]]

MAX_ID_CHARS = 128


def token_routes(server: TokenServer, *, abort: Abort, models: Sequence[str] = (), routes: bool = False) -> list[Route]:
    """The two endpoints of `server`. With `models`, a request that names one that is not among them is answered 404.

    One that `routes` to others keeps targets and priorities.
    """

    async def generate(request: Request) -> Response:
        body = _prepare(await read_body(request, GenerateRequest), request, models, routes)
        if body.stream:
            timing = _Timing()
            return await stream_response(_events(server, body, timing), headers=timing.headers)
        return await until_disconnect(request, _whole(server, body, models))

    async def abort_requests(request: Request) -> Response:
        body = await read_body(request, AbortRequest)
        await abort([name.removeprefix(ID_PREFIX) for name in body.request_ids])
        return Response()

    return [
        Route(GENERATE_PATH, generate, methods=["POST"]),
        Route(ABORT_PATH, abort_requests, methods=["POST"]),
    ]


def _prepare(request: GenerateRequest, http: Request, models: Sequence[str], routes: bool) -> GenerateRequest:
    """The request as a TokenServer takes it: with its id, its trace, transfer parameters at the top, nothing
    unsupported.
    """
    if models and request.model and request.model not in models:
        raise NotFound(f"the model `{request.model}` does not exist; this server has `{models[0]}`", param="model")
    request = _lift_transfer_params(request)
    check_supported(request, routes=routes)
    named = request_id(http) or _clean_id(request.request_id) or secrets.token_hex(16)
    return msgspec.structs.replace(request, request_id=named, traceparent=traceparent(http))


def _lift_transfer_params(request: GenerateRequest) -> GenerateRequest:
    """A rendered chat carries its transfer parameters in `extra_args`; those at the top win."""
    extra = request.sampling_params.extra_args
    if not extra or "kv_transfer_params" not in extra:
        return request
    rest = {name: value for name, value in extra.items() if name != "kv_transfer_params"}
    lifted = extra["kv_transfer_params"]
    if lifted is not None and not isinstance(lifted, dict):
        path = "sampling_params.extra_args.kv_transfer_params"
        raise ClientError(f"{path}: must be an object", param=path)
    params = msgspec.structs.replace(request.sampling_params, extra_args=rest)
    top: dict[str, Any] | None = request.kv_transfer_params if request.kv_transfer_params is not None else lifted
    return msgspec.structs.replace(request, sampling_params=params, kv_transfer_params=top)


def _clean_id(text: str) -> str:
    """An id from a body, by the rule for the header: printable ASCII without spaces, of limited length."""
    return "".join(character for character in text[: 4 * MAX_ID_CHARS] if "!" <= character <= "~")[:MAX_ID_CHARS]


async def _whole(server: TokenServer, request: GenerateRequest, models: Sequence[str]) -> Response:
    model = request.model or next(iter(models), None)
    answer = await collect(server.generate(request), model=model, created=int(time.time()))
    prompt = request.token_ids if request.return_token_ids else None
    named = msgspec.structs.replace(answer, request_id=ID_PREFIX + request.request_id, prompt_token_ids=prompt)
    return json_response(named)


class _Timing:
    """`Server-Timing` of a stream: what had happened when its first chunk was there."""

    def __init__(self) -> None:
        self.moments: dict[str, float] | None = None

    def headers(self) -> dict[str, str]:
        return {} if not self.moments else {"Server-Timing": server_timing(self.moments)}


async def _events(server: TokenServer, request: GenerateRequest, timing: _Timing) -> AsyncIterator[bytes]:
    """The stream as server-sent events, ended by `[DONE]`."""
    view = _View(request)
    async with aclosing(server.generate(request)) as chunks:
        async for chunk in chunks:
            if timing.moments is None:
                timing.moments = chunk.moments or {}
            shown = view.show(chunk)
            event = b"" if shown is None else sse.encode_event(msgspec.json.encode(shown))
            if chunk.usage is not None and not chunk.choices:
                event += sse.DONE_EVENT  # it is the last, by the contract of a TokenServer
            if event:
                yield event


class _View:
    """What this client asked to see of each chunk: its own id, the prompt's ids once, and how much usage."""

    def __init__(self, request: GenerateRequest) -> None:
        options = request.stream_options
        self._request_id = ID_PREFIX + request.request_id
        self._prompt_ids = request.token_ids if request.return_token_ids else None
        self._wants_usage = options is not None and options.include_usage
        self._wants_running = self._wants_usage and options is not None and options.continuous_usage_stats
        self._num_prompt = len(request.token_ids)
        self._num_output = len(request.output_token_ids)

    def show(self, chunk: GenerateChunk) -> GenerateChunk | None:
        if not chunk.choices and not self._wants_usage and chunk.kv_transfer_params is None:
            return None
        usage, prompt_ids = chunk.usage if self._wants_usage else None, self._prompt_ids
        self._prompt_ids = None
        if self._wants_running and chunk.choices:
            self._num_output += sum(len(choice.token_ids) for choice in chunk.choices)
            usage = Usage(self._num_prompt, self._num_output, self._num_prompt + self._num_output)
        return msgspec.structs.replace(chunk, request_id=self._request_id, usage=usage, prompt_token_ids=prompt_ids)
