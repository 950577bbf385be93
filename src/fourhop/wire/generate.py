"""Tokens in, tokens out: the one interface between every two tiers below the frontend.

Field-compatible with vLLM 0.32's `/inference/v1/generate` (`output_mode: "tokens"`). Additions are `output_token_ids`
and `grammar_start` in the request, `prompt_logprobs` in the first chunk of a stream, and `kv_transfer_params` and
`moments` in the last.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from fourhop.wire.logprobs import ChoiceLogprobs, PromptLogprobs
from fourhop.wire.structure import GrammarStart

FinishReason = Literal["stop", "length", "abort", "migrated"]
"""Why a choice ended. `migrated`: it goes on elsewhere, with the ticket that comes beside it; clients never see it."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose tokens. Names and defaults are vLLM's; `render` always writes `max_tokens`.

    `max_tokens` None means "the rest of the window". `stop` (strings) is enforced by the frontend, which is the only
    tier that knows text; an engine ignores it. Fields that only steer vLLM's own output are accepted and unused.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    bad_words: list[str] = []
    ignore_eos: bool = False
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


Milliseconds = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]


class Targets(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a request shall keep: time to the first token, and between two tokens. 0, the default: nothing."""

    ttft_ms: Milliseconds = 0.0
    itl_ms: Milliseconds = 0.0


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A rendered prompt and what to do with it. Only `token_ids` and `sampling_params` are required.

    `output_token_ids` are tokens that were already generated and delivered: the engine continues after them, counts
    them as output (limits, penalties, seed positions) and does not send them again. `grammar_start` says where
    `structured_outputs` begin; an engine that does not know it (vLLM) uses its own reasoning parser. `traceparent`
    travels as a header (`wire.trace`).
    """

    token_ids: list[int]
    sampling_params: SamplingParams
    request_id: str = ""
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    output_mode: str = "tokens"
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    output_token_ids: list[int] = []
    token_offsets: list[list[int]] | None = None
    features: Any = None
    content_parts: Any = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    grammar_start: GrammarStart | None = None
    targets: Targets | None = None
    traceparent: str | None = None
    ec_transfer_params: dict[str, Any] | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True, gc=False):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class ChunkChoice(msgspec.Struct, frozen=True, gc=False):
    """What one choice gained: new token ids, and at its end a finish reason, possibly without tokens.

    `stop_reason` is the stop token id that ended the choice, None for EOS and for length.
    """

    index: int = 0
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: ChoiceLogprobs | None = None


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One event of a stream. At most one choice each; a usage chunk has none.

    `kv_transfer_params` (a ticket) and `moments` (seconds after the hop received the request) come with the finish,
    `prompt_logprobs` with the first token of choice 0, which comes before those of other choices then.
    """

    request_id: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    output_mode: str = "tokens"
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: dict[str, Any] | None = None
    moments: dict[str, float] | None = None


class GenerateChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: ChoiceLogprobs | None = None


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer of a request that is not streamed."""

    request_id: str
    model: str | None
    created: int
    choices: list[GenerateChoice]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    output_mode: str = "tokens"


class AbortRequest(msgspec.Struct, frozen=True):
    request_ids: list[str]
