"""`Dialect`: how a server is asked for tokens, and what of its answers is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from fourhop.wire.generate import ChunkChoice, GenerateChunk, GenerateRequest, Usage
from fourhop.wire.logprobs import PromptLogprobs

GENERATE_PATH = "/inference/v1/generate"


class ErrorEvent(msgspec.Struct):
    message: str = "the upstream server failed"
    type: str | None = None
    param: str | None = None
    code: int | str | None = None


class Event(msgspec.Struct):
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
    """An endpoint. `encode` makes a request's body, `decode` reads an event of a stream, `decode_whole` an answer that
    is none. Both raise msgspec.DecodeError.
    """

    path: str
    encode: Callable[[GenerateRequest], bytes]
    decode: Callable[[bytes], Event]
    decode_whole: Callable[[bytes], Whole]


GENERATE = Dialect(
    GENERATE_PATH, msgspec.json.encode, msgspec.json.Decoder(Event).decode, msgspec.json.Decoder(Whole).decode
)
"""Ours, and that of a vLLM with `--tokens-only` or `--enable-scale-out`."""
