"""What derendering one request needs besides its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fourhop.frontend.detokenize import Tokenizer
from fourhop.frontend.forced_calls import forced_table
from fourhop.frontend.parsers import Parsers, find
from fourhop.frontend.parsers.machine import Table
from fourhop.frontend.phrases import Phrases
from fourhop.frontend.sampling import is_prompt_alone, stop_strings
from fourhop.wire.openai import SamplingRequest
from fourhop.wire.openai_chat import ChatCompletionRequest, NamedToolChoice
from fourhop.wire.openai_completion import CompletionRequest


@dataclass(frozen=True, kw_only=True)
class Context:
    """The request's side of derendering; `Derenderer.start` alone reads the prompt (None: it is not known).

    `stop_token_ids`, EOS among them unless it is ignored, end the text, and `skipped` are left out of it.
    `tools` are those that the request offers; markup without types takes them from there.
    `*_top_logprobs` None means that none were asked for, `max_calls` None any number of calls. With `echo` the prompt
    is written before the answer, and with `drops_output` it is all there is: an engine makes at least one token.
    """

    tokenizer: Tokenizer
    parsers: Parsers
    table: Table
    prompt_token_ids: list[int] | None
    request_id: str
    stops: Phrases
    include_stop: bool
    stop_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    skipped: frozenset[int]
    tools: Sequence[Mapping[str, Any]] = ()
    chat_template_kwargs: Mapping[str, Any] | None = None
    chat_top_logprobs: int | None = None
    completion_top_logprobs: int | None = None
    include_reasoning: bool = True
    max_calls: int | None = None
    is_call_named: bool = False
    echo: bool = False
    drops_output: bool = False


def chat_context(
    request: ChatCompletionRequest,
    prompt_token_ids: list[int] | None,
    tokenizer: Tokenizer,
    parsers: Parsers,
    *,
    eos_token_ids: frozenset[int] = frozenset(),
    request_id: str = "",
    default_chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Context:
    """The context of a chat request. `request_id` keeps tool-call ids of equal requests apart; the template arguments
    tell whether thinking is on when the prompt is not known.

    Raises ClientError for an empty stop string.
    """
    return Context(
        tokenizer=tokenizer,
        parsers=parsers,
        table=forced_table(request, parsers)
        or parsers.table(offers_tools=bool(request.tools) and request.tool_choice != "none"),
        prompt_token_ids=prompt_token_ids,
        request_id=request_id,
        stops=Phrases(stop_strings(request.stop)),
        include_stop=bool(request.include_stop_str_in_output),
        stop_token_ids=_stop_token_ids(request, eos_token_ids),
        eos_token_ids=eos_token_ids,
        skipped=_skipped(request, tokenizer) - parsers.shown_ids,
        tools=request.tools or (),
        chat_template_kwargs={**(default_chat_template_kwargs or {}), **(request.chat_template_kwargs or {})},
        chat_top_logprobs=request.top_logprobs or 0 if request.logprobs else None,
        include_reasoning=request.include_reasoning,
        max_calls=1 if request.parallel_tool_calls is False else None,
        is_call_named=isinstance(request.tool_choice, NamedToolChoice),
    )


def completion_context(
    request: CompletionRequest,
    prompt_token_ids: list[int] | None,
    tokenizer: Tokenizer,
    *,
    eos_token_ids: frozenset[int] = frozenset(),
) -> Context:
    """The context of a plain completion: no parsers. Raises ClientError for an empty stop string."""
    parsers = find(None, None, tokenizer)
    return Context(
        tokenizer=tokenizer,
        parsers=parsers,
        table=parsers.without_tools,
        prompt_token_ids=prompt_token_ids,
        request_id="",
        stops=Phrases(stop_strings(request.stop)),
        include_stop=bool(request.include_stop_str_in_output),
        stop_token_ids=_stop_token_ids(request, eos_token_ids),
        eos_token_ids=eos_token_ids,
        skipped=_skipped(request, tokenizer),
        completion_top_logprobs=request.logprobs,
        echo=bool(request.echo),
        drops_output=is_prompt_alone(request),
    )


def _stop_token_ids(request: SamplingRequest, eos_token_ids: frozenset[int]) -> frozenset[int]:
    return frozenset(request.stop_token_ids or ()) | (frozenset() if request.ignore_eos else eos_token_ids)


def _skipped(request: SamplingRequest, tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset() if request.skip_special_tokens is False else tokenizer.special_ids
