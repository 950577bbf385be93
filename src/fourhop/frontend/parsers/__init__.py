"""Reasoning and tool-call parsers: `find` gives the tables of a server, bound to its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from fourhop.frontend.detokenize import Tokenizer
from fourhop.frontend.parsers.machine import Table, bind, last_marker, spelling_ids
from fourhop.frontend.parsers.plugins import Catalog
from fourhop.frontend.parsers.table import CONTENT_STATE, Body, ReasoningFamily, State, ToolFamily, merge, openai_id
from fourhop.wire.errors import StartError

Family = TypeVar("Family")


class Parsers:
    """The parsers of one server: `with_tools` is for requests that offer tools, `without_tools` for others.

    `shown_ids` are special tokens that are text all the same: markers are spelled with them.
    """

    def __init__(self, reasoning: ReasoningFamily | None, tool: ToolFamily | None, tokenizer: Tokenizer) -> None:
        self.with_tools = bind(merge(reasoning, tool), tokenizer)
        self.without_tools = bind(merge(reasoning, None), tokenizer)
        self.has_reasoning = reasoning is not None
        self.has_tools = tool is not None
        self.shown_ids = spelling_ids(self.with_tools, tokenizer)
        self.new_call_id = tool.new_id if tool else openai_id
        self.reasoning = reasoning
        self._tool = tool
        self._tokenizer = tokenizer

    @property
    def has_any(self) -> bool:
        return self.has_reasoning or self.has_tools

    def table(self, *, offers_tools: bool) -> Table:
        return self.with_tools if offers_tools else self.without_tools

    def table_of(self, body: Body) -> Table:
        """The table of an answer whose text is what `body` says, after any thinking; calls in markup count too."""
        own = dict(self._tool.states) if self._tool else {CONTENT_STATE: State(body)}
        forced = ToolFamily({**own, CONTENT_STATE: replace(own[CONTENT_STATE], body=body)})
        return bind(merge(self.reasoning, forced), self._tokenizer)

    def first_state(self, prompt_token_ids: list[int] | None, chat_template_kwargs: Mapping[str, Any] | None) -> str:
        """The state that the output of this prompt starts in; None stands for a prompt that is not known."""
        family = self.reasoning
        if family is None:
            return CONTENT_STATE
        if prompt_token_ids is None:
            return family.outside if self._is_switched_off(chat_template_kwargs) else family.inside
        last = self._last_marker(prompt_token_ids)
        if last is None:
            opens = family.opens_unasked and not self._is_switched_off(chat_template_kwargs)
            return family.inside if opens else family.outside
        return family.inside if last == family.opening else family.outside

    def reasoning_ended(
        self, prompt_token_ids: list[int], chat_template_kwargs: Mapping[str, Any] | None
    ) -> bool | None:
        """Whether no thinking is to come: the prompt closed it, or the request did. None without a parser."""
        family = self.reasoning
        if family is None:
            return None
        last = self._last_marker(prompt_token_ids)
        return last == family.closing or (last is None and self._is_switched_off(chat_template_kwargs))

    def _last_marker(self, prompt_token_ids: list[int]) -> str | None:
        family = self.reasoning
        assert family is not None
        return last_marker(prompt_token_ids, (family.opening, family.closing), family.turns, self._tokenizer)

    def _is_switched_off(self, chat_template_kwargs: Mapping[str, Any] | None) -> bool:
        family = self.reasoning
        assert family is not None
        kwargs = chat_template_kwargs or {}
        said = [kwargs[switch] for switch in family.switches if isinstance(kwargs.get(switch), bool)]
        return not all(said) if said else family.is_off_unasked


def find(reasoning: str | None, tool: str | None, tokenizer: Tokenizer, catalog: Catalog | None = None) -> Parsers:
    """The parsers with these names; None and "none" mean no parser. Raises StartError for an unknown name."""
    known = catalog or Catalog()
    return Parsers(_family("reasoning", reasoning, known.reasoning), _family("tool call", tool, known.tools), tokenizer)


def _family(kind: str, name: str | None, families: Mapping[str, Family | None]) -> Family | None:
    if name is not None and name not in families:
        raise StartError(f"unknown {kind} parser {name!r}; known: {', '.join(sorted(families))}")
    return families[name] if name is not None else None
