"""OpenAI plain completions: request, response and stream chunk, with vLLM's extension fields."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from fourhop.wire.generate import FinishReason, Usage
from fourhop.wire.logprobs import PromptLogprobs
from fourhop.wire.openai import SamplingRequest


class CompletionRequest(SamplingRequest, frozen=True, kw_only=True):
    """`prompt` is a text, several texts, token ids, or several lists of ids. Text gets the tokenizer's special tokens
    unless `add_special_tokens` is false; ids are taken as they are.

    `echo` writes the prompt before the answer, and with `logprobs` those of its tokens; with `max_tokens` 0 the
    prompt is all there is.
    """

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    add_special_tokens: bool = True

    # Known and refused: see COMPLETION_UNSUPPORTED_FIELDS.
    suffix: Any = None
    prompt_embeds: Any = None


COMPLETION_UNSUPPORTED_FIELDS = ("suffix", "prompt_embeds")


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel lists, one entry a token. `text_offset` counts characters from the start of the choice's text."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One choice per prompt and n, numbered through."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: str = "text_completion"
    kv_transfer_params: dict[str, Any] | None = None


class CompletionChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream. The usage chunk has `choices == []`; others leave `usage` out."""

    id: str
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
