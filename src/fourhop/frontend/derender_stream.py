"""`POST /v1/chat/completions/derender/stream`: generate's events in the body, OpenAI's in the answer, as they come.

The body is a stream of server-sent events: first a `ChatDerenderStart`, then what generate sent, verbatim, up to its
`[DONE]`. It takes the place of a token server, so an answer is that of `/v1/chat/completions` on the same tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from fourhop.frontend import derender_checks as checks
from fourhop.frontend.chat import Chat
from fourhop.frontend.context import chat_context
from fourhop.frontend.derender_checks import Limits
from fourhop.frontend.generation import Generation
from fourhop.frontend.pipeline import Pipeline, new_id
from fourhop.frontend.render import Prompt
from fourhop.frontend.sampling import check_chat
from fourhop.service import stream_response
from fourhop.service.answers import until_gone
from fourhop.tokens.limits import check_token_ids
from fourhop.wire import sse
from fourhop.wire.derender import ChatDerenderStart
from fourhop.wire.errors import ClientError, PayloadTooLarge, client_error, error_from_body
from fourhop.wire.generate import GenerateChunk, GenerateRequest, SamplingParams
from fourhop.wire.openai_chat import ChatCompletionRequest

T = TypeVar("T")


async def derender_stream(request: Request, pipeline: Pipeline, limits: Limits) -> Response:
    """The endpoint. What is wrong in the first event has its status; later errors are events."""
    life = pipeline.life("derender_stream", request)
    with life.watch():
        body = BodyEvents(request)
        start = _convert(await body.next(), ChatDerenderStart)
        chat = msgspec.structs.replace(start.chat_request, stream=True)
        life.request_id = new_id(request, start.request_id)
        pipeline.renderer.model.check_name(start.model or chat.model)
        prompt = start.prompt_token_ids
        if prompt is None:
            prompt = (await pipeline.workers.run(_prompt, chat, pipeline)).token_ids
        check_token_ids(prompt, limits.vocab_size, "prompt_token_ids")
        rendered = GenerateRequest(
            request_id=start.request_id or f"chatcmpl-{life.request_id}",
            token_ids=prompt,
            sampling_params=SamplingParams(n=_num_choices(chat, limits)),
        )
        context = chat_context(
            chat,
            prompt,
            pipeline.renderer.tokenizer,
            pipeline.renderer.parsers,
            eos_token_ids=pipeline.renderer.model.eos_token_ids,
            request_id=rendered.request_id,
        )
        life.rendered([rendered])
        answer = Chat(
            request=chat,
            generation=Generation(BodyTokens(body, limits), rendered, context, life, names={}),
            life=life,
            model=start.model or pipeline.renderer.model.name,
            created=int(pipeline.now_s()),
            counts_reasoning=pipeline.renderer.parsers.has_reasoning,
        )
    return await stream_response(answer.events(), headers=life.headers, gone=body.until_gone)


class BodyEvents:
    """The events of a request's body, as they arrive, and the end of the connection after them."""

    def __init__(self, request: Request) -> None:
        self._limit = request.app.state.server_config.max_body_bytes
        self._chunks = request.stream()
        self._decoder = sse.SSEDecoder()
        self._events: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_read = asyncio.Event()
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != sse.CONTENT_TYPE:
            raise ClientError(f"Content-Type must be {sse.CONTENT_TYPE}, not {media_type or 'missing'}")

    async def next(self) -> bytes:
        """The next event's data. Raises ClientError when the body has ended."""
        while not self._events:
            chunk = await anext(self._chunks, None)
            if chunk is None:
                self._is_read.set()
                raise ClientError("the body ended before the answer did")
            self._num_bytes += len(chunk)
            if self._num_bytes > self._limit:
                raise PayloadTooLarge(f"the body is larger than the limit of {self._limit} bytes")
            self._events += self._decoder.feed(chunk)
        return self._events.popleft()

    async def until_gone(self, receive: Receive) -> None:
        """Returns when the client is gone. While the body is read, that is seen by who reads it."""
        await self._is_read.wait()
        await until_gone(receive)


class BodyTokens:
    """A token server whose chunks stand in a request's body."""

    def __init__(self, body: BodyEvents, limits: Limits) -> None:
        self._body = body
        self._limits = limits

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        unfinished = set(range(request.sampling_params.n))
        while (data := await self._body.next()) != sse.DONE:
            chunk = self._chunk(data)
            yield chunk
            unfinished -= {choice.index for choice in chunk.choices if choice.finish_reason is not None}
        if unfinished:
            raise ClientError(f"choice {min(unfinished)} has no finish reason")

    def _chunk(self, data: bytes) -> GenerateChunk:
        event = _convert(data, dict[str, Any])
        if "error" in event:
            code = event["error"].get("code") if isinstance(event["error"], dict) else None
            raise error_from_body(code if isinstance(code, int) and 400 <= code <= 599 else 502, data)
        chunk = _convert(data, GenerateChunk)
        checks.only_choice(chunk, self._limits)
        return chunk


def _prompt(chat: ChatCompletionRequest, pipeline: Pipeline) -> Prompt:
    check_chat(chat, pipeline.renderer.config)
    return pipeline.renderer.chat_prompt(chat)


def _num_choices(chat: ChatCompletionRequest, limits: Limits) -> int:
    n = 1 if chat.n is None else chat.n
    if not 1 <= n <= limits.max_num_choices:
        path = "chat_request.n"
        raise ClientError(f"{path}: must be between 1 and {limits.max_num_choices}", param=path)
    return n


def _convert(data: bytes, type: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=type)
    except msgspec.ValidationError as error:
        raise client_error(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientError(f"an event is not valid JSON: {error}") from None
