"""Reasoning and tool-call parsers: `find` gives the tables of a server, bound to its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from fourhop.frontend.detokenize import Tokenizer
from fourhop.frontend.parsers.families import REASONING_FAMILIES, TOOL_FAMILIES
from fourhop.frontend.parsers.machine import Table, bind, last_marker
from fourhop.frontend.parsers.table import CONTENT_STATE, ReasoningFamily, ToolFamily, merge
from fourhop.wire.errors import StartError

Family = TypeVar("Family")


class Parsers:
    """The parsers of one server: `with_tools` is for requests that offer tools, `without_tools` for others."""

    def __init__(self, reasoning: ReasoningFamily | None, tool: ToolFamily | None, tokenizer: Tokenizer) -> None:
        self.with_tools = bind(merge(reasoning, tool), tokenizer)
        self.without_tools = bind(merge(reasoning, None), tokenizer)
        self.has_reasoning = reasoning is not None
        self.has_tools = tool is not None
        self._reasoning = reasoning
        self._tokenizer = tokenizer

    @property
    def has_any(self) -> bool:
        return self.has_reasoning or self.has_tools

    def table(self, *, offers_tools: bool) -> Table:
        return self.with_tools if offers_tools else self.without_tools

    def first_state(self, prompt_token_ids: list[int] | None, chat_template_kwargs: Mapping[str, Any] | None) -> str:
        """The state that the output of this prompt starts in; None stands for a prompt that is not known."""
        family = self._reasoning
        if family is None:
            return CONTENT_STATE
        if prompt_token_ids is None:
            return family.outside if self._is_switched_off(chat_template_kwargs) else family.inside
        last = self._last_marker(prompt_token_ids)
        if last is None:
            return family.inside if family.opens_unasked else family.outside
        return family.inside if last == family.opening else family.outside

    def reasoning_ended(
        self, prompt_token_ids: list[int], chat_template_kwargs: Mapping[str, Any] | None
    ) -> bool | None:
        """Whether no thinking is to come: the prompt closed it, or the request did. None without a parser."""
        family = self._reasoning
        if family is None:
            return None
        last = self._last_marker(prompt_token_ids)
        return last == family.closing or (last is None and self._is_switched_off(chat_template_kwargs))

    def _last_marker(self, prompt_token_ids: list[int]) -> str | None:
        family = self._reasoning
        assert family is not None
        return last_marker(prompt_token_ids, (family.opening, family.closing), family.turns, self._tokenizer)

    def _is_switched_off(self, chat_template_kwargs: Mapping[str, Any] | None) -> bool:
        assert self._reasoning is not None
        kwargs = chat_template_kwargs or {}
        return any(kwargs.get(switch) is False for switch in self._reasoning.switches)


def find(reasoning: str | None, tool: str | None, tokenizer: Tokenizer) -> Parsers:
    """The parsers with these names; None and "none" mean no parser. Raises StartError for an unknown name."""
    return Parsers(
        _family("reasoning", reasoning, REASONING_FAMILIES), _family("tool call", tool, TOOL_FAMILIES), tokenizer
    )


def _family(kind: str, name: str | None, families: Mapping[str, Family | None]) -> Family | None:
    if name is not None and name not in families:
        raise StartError(f"unknown {kind} parser {name!r}; known: {', '.join(sorted(families))}")
    return families[name] if name is not None else None
