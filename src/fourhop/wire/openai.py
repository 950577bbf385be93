"""What OpenAI's chat and plain completions share, and the small endpoints around them.

Requests ignore unknown fields, as OpenAI-compatible servers do; a known field of the wrong type is an error with its
path. Fields beyond OpenAI's are vLLM's. Fields that this project knows and does not support are declared as well
(`UNSUPPORTED_FIELDS`), so that rendering can refuse them by name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fourhop.wire.generate import StreamOptions, Targets


class SamplingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that chat and plain completions have in common. None means "the model's default"."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    max_tokens: int | None = None
    min_tokens: int | None = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    return_token_ids: bool | None = None
    return_token_offsets: bool | None = False
    cache_salt: str | None = None
    priority: int | None = 0
    targets: Targets | None = None
    request_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prompt_logprobs: int | None = None

    # What structure the output has; `fourhop.frontend.structure` reads them.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    # Known and refused: see UNSUPPORTED_FIELDS.
    logprob_token_ids: Any = None
    use_beam_search: Any = None
    best_of: Any = None
    bad_words: Any = None
    logits_processors: Any = None
    truncate_prompt_tokens: Any = None
    return_tokens_as_token_ids: Any = None
    thinking_token_budget: Any = None
    vllm_xargs: Any = None
    ec_transfer_params: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


UNSUPPORTED_FIELDS = (
    "logprob_token_ids",
    "use_beam_search",
    "bad_words",
    "logits_processors",
    "truncate_prompt_tokens",
    "return_tokens_as_token_ids",
    "thinking_token_budget",
    "vllm_xargs",
    "ec_transfer_params",
    "mm_processor_kwargs",
    "media_io_kwargs",
)
"""Fields of SamplingRequest that mean something in vLLM and are refused here unless null, false or empty."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    max_model_len: int
    root: str
    object: str = "model"
    owned_by: str = "fourhop"
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`: either `prompt`, or `messages` and the template fields of a chat request.

    `add_special_tokens` None means true for a prompt and false for a chat.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Any = None


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str
