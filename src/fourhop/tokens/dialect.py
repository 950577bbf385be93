"""`Dialect`: how a server is asked for tokens, and what of its answers is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fourhop.wire.generate import ChunkChoice, GenerateChunk, GenerateRequest, Usage
from fourhop.wire.logprobs import PromptLogprobs
from fourhop.wire.prompt import encoded

GENERATE_PATH = "/inference/v1/generate"


class ErrorEvent(msgspec.Struct):
    message: str = "the upstream server failed"
    type: str | None = None
    param: str | None = None
    code: int | str | None = None


class Event(msgspec.Struct, gc=False):
    """A chunk or an error, as any server of this protocol may write it."""

    choices: list[ChunkChoice] = []
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: dict[str, Any] | None = None
    moments: dict[str, float] | None = None
    error: ErrorEvent | None = None


class Whole(msgspec.Struct):
    """An answer that was not streamed."""

    choices: list[ChunkChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def chunks(self, request_id: str) -> list[GenerateChunk]:
        """The answer as a stream: each choice at once, the prompt told of with the first and the transfer parameters
        with the last one, the usage.
        """
        shown = [GenerateChunk(request_id=request_id, choices=[choice]) for choice in self.choices]
        shown[:1] = [msgspec.structs.replace(first, prompt_logprobs=self.prompt_logprobs) for first in shown[:1]]
        shown[-1:] = [msgspec.structs.replace(last, kv_transfer_params=self.kv_transfer_params) for last in shown[-1:]]
        return [*shown, GenerateChunk(request_id=request_id, choices=[], usage=self.usage)]


@dataclass(frozen=True)
class Dialect:
    """An endpoint. `encode` makes a request's body, `decode` reads an event of a stream, `decode_all` several at once,
    `decode_whole` an answer that is none. All raise msgspec.DecodeError.
    """

    path: str
    encode: Callable[[GenerateRequest], bytes]
    decode: Callable[[bytes], Event]
    decode_all: Callable[[Sequence[bytes]], list[Event]]
    decode_whole: Callable[[bytes], Whole]


_EVENT = msgspec.json.Decoder(Event)


def _encode(request: GenerateRequest) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(request, token_ids=encoded(request.token_ids)))


def _decode_all(several: Sequence[bytes]) -> list[Event]:
    """One call for all, which is what a stream that bursts costs most of. Each must be one value on a line."""
    events = [] if b"\n" in b"".join(several) else _EVENT.decode_lines(b"\n".join(several))
    return events if len(events) == len(several) else [_EVENT.decode(one) for one in several]


GENERATE = Dialect(GENERATE_PATH, _encode, _EVENT.decode, _decode_all, msgspec.json.Decoder(Whole).decode)
"""Ours, and that of a vLLM with `--tokens-only` or `--enable-scale-out`."""
