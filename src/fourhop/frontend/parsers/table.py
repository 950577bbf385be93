"""What a model family's markup is, as data. The machine that reads it is in `machine`.

A table is a set of named states. A state says what the text in it is (its body) and which markers lead where; a marker
is never text. A marker that the vocabulary holds as one token is recognised by its id alone, so the same characters
spelled by other tokens are ordinary text; a marker it does not hold is recognised in the text.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from fourhop.wire.derender import Count

CONTENT_STATE = "content"
"""The one state that every table has: the answer's own text."""


LETTERS = string.ascii_letters + string.digits


def openai_id(seed: str, number: int) -> str:
    """The id of call `number` of a choice, as OpenAI's and vLLM's look."""
    return "chatcmpl-tool-" + _digest(seed, number).hex()


def letters_id(seed: str, number: int) -> str:
    """Nine letters and digits: Mistral's templates take no other ids."""
    return "".join(LETTERS[byte % len(LETTERS)] for byte in _digest(seed, number)[:9])


def _digest(seed: str, number: int) -> bytes:
    return hashlib.blake2b(f"{seed}-{number}".encode(), digest_size=16).digest()


class Scratch(msgspec.Struct, array_like=True):
    """What a body remembers inside one call. The fields are the bodies' own; all of them stay small.

    `stage` is where a body stands that reads its parts with another one, which uses `phase` to `span`.
    """

    phase: Count = 0
    depth: Count = 0
    flags: Count = 0
    text: str = ""
    head: str = ""
    span: tuple[Count, Count] = (0, 0)
    stage: Count = 0
    name: str = ""


class Sink(Protocol):
    """Where the machine sends what it reads."""

    def content(self, text: str) -> None: ...

    def reasoning(self, text: str) -> None: ...

    def begin_call(self, name: str, call_id: str = "") -> None:
        """A call of the tool `name`; `call_id` is the id that the model gave it, if it did."""

    def arguments(self, text: str) -> None: ...

    def complete_call(self) -> None:
        """The last call begun is whole: its arguments are complete JSON."""

    def boundary(self) -> None:
        """A marker was read: text before it and after it is not one text."""

    def argument_types(self, call: str, argument: str) -> frozenset[str]:
        """The JSON types that the tool `call` declares for an argument; empty when it declares none."""


class Body(Protocol):
    """What the text of a state means. `scratch` is its memory, from entering the state to leaving it."""

    def open(self, scratch: Scratch, sink: Sink) -> None:
        """The state is entered."""

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None: ...

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """The state is left, by a marker or because the output ended."""


class Content:
    """The answer's text."""

    def open(self, scratch: Scratch, sink: Sink) -> None:
        """Text needs no beginning."""

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        sink.content(text)

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """Text needs no end."""


class Reasoning:
    """The model's thinking."""

    def open(self, scratch: Scratch, sink: Sink) -> None:
        """Text needs no beginning."""

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        sink.reasoning(text)

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """Text needs no end."""


class Layout:
    """Text that belongs to the markup and to no one else, such as what surrounds calls. It is left out."""

    def open(self, scratch: Scratch, sink: Sink) -> None:
        """Layout needs no beginning."""

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        """Layout goes nowhere."""

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """Layout needs no end."""


class Gap:
    """Space around calls, which is left out. Other text there is no part of the markup, so it is content."""

    def open(self, scratch: Scratch, sink: Sink) -> None:
        """A gap needs no beginning."""

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        text = text if scratch.stage else text.lstrip()
        scratch.stage = scratch.stage or int(bool(text))
        if text:
            sink.content(text)

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """A gap needs no end."""


CONTENT, REASONING, LAYOUT, GAP = Content(), Reasoning(), Layout(), Gap()


@dataclass(frozen=True)
class Fork:
    """Where a marker leads when the text before it decides: to the state of the first pattern that is found in
    `Scratch.text`, or to `otherwise`."""

    targets: Mapping[str, str]
    otherwise: str


Target = str | Fork


@dataclass(frozen=True)
class State:
    """`on` maps a marker to the state it leads to.

    A state that `continues` keeps the memory of the one before it, whose body is not closed: together they read one
    call, in parts that markers divide.
    """

    body: Body
    on: Mapping[str, Target] = field(default_factory=dict)
    continues: bool = False


States = Mapping[str, State]


@dataclass(frozen=True)
class ReasoningFamily:
    """Thinking markup.

    Which state an output starts in follows from the last of `opening` and `closing` in the prompt's last turn, which
    begins at the last of `turns`: `inside` after an opening marker, `outside` after a closing one. Without either the
    model opens thinking itself (`outside`), or thinks from the start if `opens_unasked` and the request has not
    switched it off. A prompt that is not known is taken to have opened thinking if thinking is on. One of the
    template's `switches` turns it on or off; without one it is on, or off if `is_off_unasked`.
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
    is_off_unasked: bool = False
    call_ends_thinking: bool = False


@dataclass(frozen=True)
class ToolFamily:
    """Tool-call markup. The body and the markers of its `content` state count wherever text is content.

    `new_id` makes the id of a call that the model gave none, from the choice's seed and the call's number.
    """

    states: States
    new_id: Callable[[str, int], str] = openai_id


def merge(reasoning: ReasoningFamily | None, tool: ToolFamily | None) -> dict[str, State]:
    """One table for both families. Call markers are added to each content state, and to thinking if they end it."""
    states = {CONTENT_STATE: State(CONTENT)}
    states |= dict(reasoning.states) if reasoning else {}
    if tool is None:
        return states
    content = tool.states[CONTENT_STATE]
    for name, state in states.items():
        ends = reasoning is not None and reasoning.call_ends_thinking and state.body is REASONING
        if state.body is CONTENT:
            states[name] = replace(state, body=content.body, on={**content.on, **state.on})
        elif ends:
            states[name] = replace(state, on={**content.on, **state.on})
    return states | {name: state for name, state in tool.states.items() if name != CONTENT_STATE}
