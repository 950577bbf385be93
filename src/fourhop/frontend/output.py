"""What one chunk adds to a choice, gathered from the parsing machine."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

import msgspec

from fourhop.frontend.context import Context
from fourhop.frontend.parsers.types import argument_types
from fourhop.frontend.stops import HeldTail, StopMatcher
from fourhop.wire.derender import Count
from fourhop.wire.openai_chat import FunctionCallDelta, ToolCallDelta


class CallCount(msgspec.Struct, array_like=True):
    """The calls of a choice so far. Their ids are made from `seed` and their number."""

    seed: str
    num_calls: Count = 0
    num_complete: Count = 0


class Output:
    """The machine's sink. Content passes the stop strings; nothing passes after one."""

    def __init__(self, context: Context, held: HeldTail, calls: CallCount) -> None:
        self.stops = StopMatcher(context.stops, held, include_stop=context.include_stop)
        self._include_reasoning = context.include_reasoning
        self._max_calls = context.max_calls
        self._new_id = context.parsers.new_call_id
        self._tools = context.tools
        self._count = calls
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_CallPiece] = []

    def content(self, text: str) -> None:
        if text := self.stops.feed(text):
            self._content.append(text)

    def reasoning(self, text: str) -> None:
        if self._include_reasoning and self.stops.hit is None:
            self._reasoning.append(text)

    def begin_call(self, name: str, call_id: str = "") -> None:
        index = self._count.num_calls
        self._count.num_calls += 1
        if self._is_wanted():
            self._calls.append(_CallPiece(index, call_id or self._new_id(self._count.seed, index), name))

    def arguments(self, text: str) -> None:
        index = self._count.num_calls - 1
        if not self._is_wanted():
            return
        if not self._calls or self._calls[-1].index != index:
            self._calls.append(_CallPiece(index))
        self._calls[-1].arguments += text

    def complete_call(self) -> None:
        if self._is_wanted():
            self._count.num_complete += 1

    def boundary(self) -> None:
        if text := self.stops.flush():
            self._content.append(text)

    def argument_types(self, call: str, argument: str) -> frozenset[str]:
        return argument_types(self._tools, call, argument)

    def take_content(self) -> str | None:
        return _take(self._content)

    def take_reasoning(self) -> str | None:
        return _take(self._reasoning)

    def take_calls(self) -> list[ToolCallDelta]:
        if not self._calls:
            return []
        deltas = [piece.delta() for piece in self._calls]
        self._calls.clear()
        return deltas

    def _is_wanted(self) -> bool:
        """Whether the call that was begun last is one the client gets."""
        limit = self._max_calls
        return self.stops.hit is None and (limit is None or self._count.num_calls <= limit)


def _take(texts: list[str]) -> str | None:
    if not texts:
        return None
    text = "".join(texts)
    texts.clear()
    return text or None


@dataclass(slots=True)
class _CallPiece:
    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""

    def delta(self) -> ToolCallDelta:
        if not self.id:
            return ToolCallDelta(index=self.index, function=FunctionCallDelta(arguments=self.arguments))
        function = FunctionCallDelta(name=self.name, arguments=self.arguments)
        return ToolCallDelta(index=self.index, id=self.id, type="function", function=function)


def call_seed(request_id: str, prompt_token_ids: list[int], index: int) -> str:
    """What call ids are made from: stable when a chunk is sent again, different for each turn of a conversation."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=16)
    digest.update(array("q", [*prompt_token_ids, index]).tobytes())
    return digest.hexdigest()
