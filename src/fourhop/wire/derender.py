"""The derender endpoints: what comes in and goes out, field-compatible with vLLM 0.32.

`POST /v1/chat/completions/derender` and `POST /v1/completions/derender` turn generate's answers into OpenAI's. With
`stream` they take one chunk a call, and the client carries `stream_state` from each answer to the next call.

Additions: `.../derender/batch` takes chunks of many streams in one call, `.../derender/stream` a whole stream as it
arrives.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from fourhop.wire.errors import ErrorBody
from fourhop.wire.generate import GenerateChunk, GenerateResponse
from fourhop.wire.openai_chat import ChatCompletionChunk, ChatCompletionRequest
from fourhop.wire.openai_completion import CompletionChunk, CompletionRequest

NULL = msgspec.Raw(b"null")


def _null() -> msgspec.Raw:
    return NULL


MAX_STATE_BYTES = 2048
"""A stream state as JSON is never longer than this, whatever the output's length."""


Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""A number inside a stream state: small and not negative, also when a client made it up."""


class StreamState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the derendering of one choice stands. Opaque to clients: `check` is a checksum of `data`."""

    version: int
    check: int
    data: bytes


class ChatDerenderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`generate_response` without `stream`, `generate_chunk` and the state with it.

    `chat_request` is the request that was rendered. `prompt_token_ids` and `stream_state` stay raw, since a stream
    resends the prompt with every chunk and only its first call needs it.
    """

    stream: bool = False
    model: str | None = None
    generate_response: GenerateResponse | None = None
    generate_chunk: GenerateChunk | None = None
    stream_state: msgspec.Raw = msgspec.field(default_factory=_null)
    prompt_tokens: int | None = None
    prompt_token_ids: msgspec.Raw = msgspec.field(default_factory=_null)
    chat_request: ChatCompletionRequest | None = None


class ChatDerenderChunk(msgspec.Struct, frozen=True):
    """The answer to one streamed call."""

    chunk: ChatCompletionChunk
    stream_state: StreamState | None


class ChatDerenderStream(msgspec.Struct, frozen=True, kw_only=True):
    """What arrived of one choice of one answer; otherwise as a streamed `ChatDerenderRequest`."""

    generate_chunks: list[GenerateChunk]
    model: str | None = None
    stream_state: msgspec.Raw = msgspec.field(default_factory=_null)
    prompt_tokens: int | None = None
    prompt_token_ids: msgspec.Raw = msgspec.field(default_factory=_null)
    chat_request: ChatCompletionRequest | None = None


class ChatDerenderBatch(msgspec.Struct, frozen=True):
    """`POST /v1/chat/completions/derender/batch`."""

    streams: list[ChatDerenderStream]


class ChatDerenderProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The chunks of one stream, in order, and its state after them. An `error` ends it: later chunks were not read."""

    chunks: list[ChatCompletionChunk]
    stream_state: StreamState | None
    error: ErrorBody | None = None


class ChatDerenderBatchAnswer(msgspec.Struct, frozen=True):
    """One entry for each stream, in order. An error of one is no error of the others."""

    streams: list[ChatDerenderProgress]


class ChatDerenderStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first event of the body of `POST /v1/chat/completions/derender/stream`, before those of generate.

    `chat_request` is the request that was rendered; without `prompt_token_ids` its prompt is rendered again.
    """

    chat_request: ChatCompletionRequest
    model: str | None = None
    request_id: str | None = None
    prompt_token_ids: list[int] | None = None


class CompletionDerenderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Without `stream`: one generate response per prompt, with lists of the same length for the prompts.

    With `stream`: one chunk; `prompt_tokens` is a number and `prompt_token_ids` one list.
    """

    stream: bool = False
    model: str | None = None
    generate_responses: list[GenerateResponse] | None = None
    generate_chunk: GenerateChunk | None = None
    stream_state: msgspec.Raw = msgspec.field(default_factory=_null)
    prompt_tokens: int | list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.field(default_factory=_null)
    completion_request: CompletionRequest | None = None


class CompletionDerenderChunk(msgspec.Struct, frozen=True):
    """The answer to one streamed call."""

    chunk: CompletionChunk
    stream_state: StreamState | None
