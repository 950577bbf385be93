"""What a model family's markup is, as data. The machine that reads it is in `machine`.

A table is a set of named states. A state says what the text in it is (its body) and which markers lead where; a marker
is never text. A marker that the vocabulary holds as one token is recognised by its id alone, so the same characters
spelled by other tokens are ordinary text; a marker it does not hold is recognised in the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from fourhop.wire.derender import Count

CONTENT_STATE = "content"
"""The one state that every table has: the answer's own text."""


class Scratch(msgspec.Struct, array_like=True):
    """What a body remembers inside one call. The fields are the bodies' own; all of them stay small."""

    phase: Count = 0
    depth: Count = 0
    flags: Count = 0
    text: str = ""
    head: str = ""
    span: tuple[Count, Count] = (0, 0)


class Sink(Protocol):
    """Where the machine sends what it reads."""

    def content(self, text: str) -> None: ...

    def reasoning(self, text: str) -> None: ...

    def begin_call(self, name: str) -> None: ...

    def arguments(self, text: str) -> None: ...

    def complete_call(self) -> None:
        """The last call begun is whole: its arguments are complete JSON."""

    def boundary(self) -> None:
        """A marker was read: text before it and after it is not one text."""


class Body(Protocol):
    """What the text of a state means. `scratch` is its memory, from entering the state to leaving it."""

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None: ...

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """The state is left, by a marker or because the output ended."""


class Content:
    """The answer's text."""

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        sink.content(text)

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """Text needs no end."""


class Reasoning:
    """The model's thinking."""

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        sink.reasoning(text)

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """Text needs no end."""


class Layout:
    """Text that belongs to the markup and to no one else, such as what surrounds calls. It is left out."""

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        """Layout goes nowhere."""

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """Layout needs no end."""


CONTENT, REASONING, LAYOUT = Content(), Reasoning(), Layout()


@dataclass(frozen=True)
class State:
    """`on` maps a marker to the state it leads to."""

    body: Body
    on: Mapping[str, str] = field(default_factory=dict)


States = Mapping[str, State]


@dataclass(frozen=True)
class ReasoningFamily:
    """Thinking markup.

    Which state an output starts in follows from the last of `opening` and `closing` in the prompt's last turn, which
    begins at the last of `turns`: `inside` after an opening marker, `outside` after a closing one. Without either the
    model opens thinking itself (`outside`), or thinks from the start if `opens_unasked`. A prompt that is not known is
    taken to have opened thinking unless one of the template's `switches` is false in the request.
    With `call_ends_thinking` the marker that opens a call also ends the thinking it stands in; else it is text there.
    """

    states: States
    opening: str
    closing: str
    inside: str
    outside: str
    turns: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    opens_unasked: bool = False
    call_ends_thinking: bool = False


@dataclass(frozen=True)
class ToolFamily:
    """Tool-call markup. The markers of its `content` state count wherever text is content."""

    states: States


def merge(reasoning: ReasoningFamily | None, tool: ToolFamily | None) -> dict[str, State]:
    """One table for both families. Call markers are added to each content state, and to thinking if they end it."""
    states = {CONTENT_STATE: State(CONTENT)}
    states |= dict(reasoning.states) if reasoning else {}
    if tool is None:
        return states
    openers = tool.states[CONTENT_STATE].on
    for name, state in states.items():
        ends = reasoning is not None and reasoning.call_ends_thinking and state.body is REASONING
        if state.body is CONTENT or ends:
            states[name] = State(state.body, {**openers, **state.on})
    return states | {name: state for name, state in tool.states.items() if name != CONTENT_STATE}
