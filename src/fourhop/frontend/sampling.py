"""An OpenAI request's sampling fields as SamplingParams: defaults resolved, what is not supported refused by path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import msgspec

from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.conversation import read_tools
from fourhop.frontend.model import SamplingDefaults
from fourhop.wire.errors import ClientError
from fourhop.wire.generate import SamplingParams
from fourhop.wire.openai import UNSUPPORTED_FIELDS, SamplingRequest
from fourhop.wire.openai_chat import CHAT_UNSUPPORTED_FIELDS, ChatCompletionRequest
from fourhop.wire.openai_completion import COMPLETION_UNSUPPORTED_FIELDS, CompletionRequest

MAX_STOP_STRINGS, MAX_STOP_CHARS = 64, 1024
"""Every character of an answer is compared with them, so a request has its limits; OpenAI's allow 4 strings."""


def resolve(
    request: SamplingRequest,
    defaults: SamplingDefaults,
    *,
    asked_tokens: int | None,
    room: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    structured_outputs: dict[str, Any] | None = None,
) -> SamplingParams:
    """The request's parameters. `max_tokens` is always written: what was asked for, else the model's default, at most
    the `room` that the prompt leaves in the window.

    Values out of range, such as more tokens than there is room for, are kept: `fourhop.tokens.limits` refuses them.
    """
    return SamplingParams(
        n=_first(request.n, 1),
        max_tokens=_first(asked_tokens, min(_first(defaults.max_tokens, room), room)),
        min_tokens=_first(request.min_tokens, 0),
        temperature=_first(request.temperature, defaults.temperature),
        top_p=_first(request.top_p, defaults.top_p),
        top_k=_first(request.top_k, defaults.top_k),
        min_p=_first(request.min_p, defaults.min_p),
        presence_penalty=_first(request.presence_penalty, 0.0),
        frequency_penalty=_first(request.frequency_penalty, 0.0),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
        seed=None if request.seed == -1 else request.seed,
        stop=stop_strings(request.stop),
        stop_token_ids=list(dict.fromkeys(request.stop_token_ids or [])),
        ignore_eos=bool(request.ignore_eos),
        logit_bias=request.logit_bias or None,
        allowed_token_ids=request.allowed_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=structured_outputs,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=_first(request.skip_special_tokens, True),
    )


def stop_strings(stop: str | list[str] | None) -> list[str]:
    """The stop strings without repetitions. An empty one would stop everything and is refused, as are too many."""
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOP_STRINGS:
        _refuse(f"there may be at most {MAX_STOP_STRINGS} stop strings, not {len(strings)}", "stop")
    for index, text in enumerate(strings):
        path = "stop" if isinstance(stop, str) else f"stop[{index}]"
        if not text:
            _refuse("a stop string must not be empty", path)
        if len(text) > MAX_STOP_CHARS:
            _refuse(f"a stop string may have at most {MAX_STOP_CHARS} characters, not {len(text)}", path)
    return list(dict.fromkeys(strings))


def chat_logprobs(request: ChatCompletionRequest) -> int | None:
    """How many alternatives to return with each token; None for no logprobs at all."""
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        _refuse("top_logprobs needs logprobs: true", "top_logprobs")
    return None


def completion_prompt_logprobs(request: CompletionRequest) -> int | None:
    """How many alternatives to return with each prompt token: an echoed one has what a generated one has."""
    asked = [
        count for count in (request.prompt_logprobs, request.logprobs if request.echo else None) if count is not None
    ]
    return max(asked, default=None)


def is_prompt_alone(request: CompletionRequest) -> bool:
    """True if the answer is the echoed prompt without anything after it."""
    return bool(request.echo) and request.max_tokens == 0


def check_chat(request: ChatCompletionRequest, config: FrontendConfig) -> None:
    """Refuse, by the field's path, what a chat request may not or cannot ask of this server."""
    _check_shared(request)
    _refuse_given(request, CHAT_UNSUPPORTED_FIELDS)
    if request.add_generation_prompt and request.continue_final_message:
        _refuse("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    _check_template_kwargs(request.chat_template_kwargs or {})
    _check_tool_choice(request, config)


def check_completion(request: CompletionRequest) -> None:
    """Refuse, by the field's path, what a completion request cannot ask of this server."""
    _check_shared(request)
    _refuse_given(request, COMPLETION_UNSUPPORTED_FIELDS)


def _check_shared(request: SamplingRequest) -> None:
    _refuse_given(request, UNSUPPORTED_FIELDS)
    if request.best_of is not None and request.best_of != _first(request.n, 1):
        _refuse("best_of other than n is not supported", "best_of")
    options = request.stream_options
    if options is not None and not request.stream:
        _refuse("stream_options needs stream: true", "stream_options")
    if options is not None and options.continuous_usage_stats:
        _refuse("usage comes once, with the last chunk", "stream_options.continuous_usage_stats")


def _refuse_given(request: msgspec.Struct, names: Iterable[str]) -> None:
    """Null, false and empty values ask for nothing and pass."""
    for name in names:
        value = getattr(request, name)
        if not (value is None or value is False or value in ("", [], {})):
            _refuse(f"{name} is not supported", name)


RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that belong to the request itself or to transformers' `apply_chat_template`."""


def _check_template_kwargs(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        path = f"chat_template_kwargs.{name[:100]}"
        if name in RESERVED_TEMPLATE_KWARGS:
            _refuse(f"{name} is not a template argument; use the request's own field", path)
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            # A template would take the text "false" for true.
            _refuse(f'"{value}" is a text, not a boolean', path)


def _check_tool_choice(request: ChatCompletionRequest, config: FrontendConfig) -> None:
    tools = read_tools(request.tools)
    choice = request.tool_choice
    if choice is not None and choice != "none" and not tools:
        _refuse("tool_choice needs tools", "tool_choice")
    if tools and choice in (None, "auto") and not config.enable_auto_tool_choice:
        _refuse('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set', "tool_choice")


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next(value for value in values if value is not None)


def _refuse(message: str, param: str) -> NoReturn:
    raise ClientError(f"{param}: {message}", param=param)
