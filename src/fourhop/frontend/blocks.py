"""An answer as consecutive blocks of thinking, text and calls: what the responses and messages APIs stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from msgspec import UNSET

from fourhop.frontend.derender import Delta
from fourhop.wire.openai_chat import ToolCallDelta

Kind = Literal["thinking", "text", "call"]
StepKind = Literal["begin", "piece", "end"]


@dataclass
class Block:
    """One block so far. `call_id` and `name` are a call's, whose text is its arguments."""

    number: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class Step:
    """A block begins, gains a piece of text, or ends."""

    kind: StepKind
    block: Block
    text: str = ""


class Blocks:
    """Cuts one choice's deltas into blocks. A block ends where another kind of text, or another call, begins."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._is_open = False

    def feed(self, delta: Delta) -> list[Step]:
        """Arguments that go on come first: what else the delta holds comes after that call."""
        going_on = next((n for n, piece in enumerate(delta.tool_calls) if piece.id is not UNSET), len(delta.tool_calls))
        steps = [step for piece in delta.tool_calls[:going_on] for step in self._call(piece)]
        if delta.reasoning:
            steps += self._enter("thinking")
            steps.append(self._gain(delta.reasoning))
        if delta.content:
            steps += self._enter("text")
            steps.append(self._gain(delta.content))
        for piece in delta.tool_calls[going_on:]:
            steps += self._call(piece)
        return steps

    def close(self) -> list[Step]:
        """The answer is over: the open block ends."""
        if not self._is_open:
            return []
        self._is_open = False
        return [Step("end", self.all[-1])]

    def _call(self, piece: ToolCallDelta) -> list[Step]:
        steps: list[Step] = []
        function = piece.function
        if piece.id is not UNSET:
            steps += self._enter("call", piece.id, "" if function.name is UNSET else function.name)
        if function.arguments is not UNSET and function.arguments:
            steps.append(self._gain(function.arguments))
        return steps

    def _enter(self, kind: Kind, call_id: str = "", name: str = "") -> list[Step]:
        if self._is_open and self.all[-1].kind == kind and kind != "call":
            return []
        steps = self.close()
        self.all.append(Block(len(self.all), kind, call_id, name))
        self._is_open = True
        return [*steps, Step("begin", self.all[-1])]

    def _gain(self, text: str) -> Step:
        self.all[-1].pieces.append(text)
        return Step("piece", self.all[-1], text)
