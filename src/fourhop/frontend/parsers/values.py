"""The value of a tagged argument: text without a type becomes JSON of the type that the tool declares.

- A text is a string if the tool allows one, streamed as it comes; only `null`, a list and an object are taken for what
  they look like, where they are allowed besides.
- Otherwise it is converted if it is a number, a boolean, null, or a list or object as JSON or Python write them, and
  the tool allows that type. What cannot be converted stays a string: nothing is guessed, nothing is lost.
- Where no type is declared, a list or an object is one, and everything else is a string.

Conversion needs the whole text, so the text waits while it may still be converted, at most `MAX_WAITING` characters. A
longer list or object is streamed from there on, and a mistake later in it breaks the call off.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from fourhop.frontend.parsers import literal
from fourhop.frontend.parsers.literal import Literal, escaped
from fourhop.frontend.parsers.table import Scratch, Sink

MAX_WAITING = 192
MAX_SCALAR_CHARS = 64

ANY_BUT_STRING = frozenset({"null", "boolean", "integer", "number", "array", "object"})
_CONTAINERS = frozenset({"array", "object"})
_BRACKETS = {"[": "array", "{": "object"}
_NULLS = ("null", "None")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)(\.0+)?")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


class Mode(IntEnum):
    STRING = 0
    WAITING = 1
    STREAMED = 2  # a list or object that got too long to wait for


TYPES = ("null", "boolean", "integer", "number", "array", "object")
"""What a value may be besides a string; `Scratch.depth` is a set of them, one bit each."""
AT_START = 4
"""A flag besides those of a literal: nothing of a string was read yet."""


@dataclass
class Value:
    """In `scratch`: `span[0]` is the mode, `depth` the allowed types, `head` the text that waits."""

    margin: str
    scratch: Scratch
    sink: Sink

    def begin(self, types: frozenset[str]) -> None:
        """Start a value of one of these types; of none: its type is open."""
        scratch = self.scratch
        types = types or _CONTAINERS | {"string"}
        if "string" in types:
            types &= _CONTAINERS | {"null"}
        scratch.depth = sum(1 << number for number, name in enumerate(TYPES) if name in types)
        scratch.head, scratch.phase = "", 0
        scratch.flags = scratch.flags & ~(literal.Flag.SINGLE | literal.Flag.COMMA) | AT_START
        self._set_mode(Mode.WAITING)
        if not scratch.depth:
            self._become_string()

    def feed(self, text: str) -> None:
        scratch = self.scratch
        if scratch.span[0] == Mode.WAITING:
            room = max(0, MAX_WAITING - len(scratch.head))
            scratch.head, text = scratch.head + text[:room], text[room:]
            if not self._may_convert(scratch.head.strip()):
                self._become_string()
            elif len(scratch.head) >= MAX_WAITING:
                self._stop_waiting()
        if scratch.span[0] == Mode.STRING:
            self._string(text)
        elif scratch.span[0] == Mode.STREAMED:
            self._stream(text)

    def end(self) -> bool:
        """The text is over. Whether the value is whole."""
        scratch = self.scratch
        if scratch.span[0] == Mode.STREAMED:
            return Literal(scratch).finish(self.sink.arguments)
        if scratch.span[0] == Mode.WAITING:
            converted = self._convert(scratch.head.strip())
            if converted is not None:
                self.sink.arguments(converted)
                scratch.head = ""
                return True
            self._become_string()
        self.sink.arguments(escaped(scratch.head.removesuffix(self.margin)) + '"')
        scratch.head = ""
        return True

    def _string(self, text: str) -> None:
        """Pass text on, without the margin at its start; one that may be the margin at its end waits."""
        scratch = self.scratch
        text = scratch.head + text
        if scratch.flags & AT_START and len(text) >= len(self.margin):
            text = text.removeprefix(self.margin)
            scratch.flags &= ~AT_START
        size = next((n for n in range(len(self.margin), 0, -1) if text.endswith(self.margin[:n])), 0)
        scratch.head = text[len(text) - size :]
        if len(text) > size:
            self.sink.arguments(escaped(text[: len(text) - size]))

    def _stream(self, text: str) -> None:
        end = Literal(self.scratch).read(text, 0, self.sink.arguments)
        if text[end:].strip():
            self.scratch.phase = literal.Phase.WRONG

    def _become_string(self) -> None:
        text, self.scratch.head = self.scratch.head, ""
        self._set_mode(Mode.STRING)
        self.sink.arguments('"')
        self._string(text)

    def _stop_waiting(self) -> None:
        """A list or object that is right so far is streamed; anything else of this length is a string."""
        scratch, text = self.scratch, self.scratch.head
        written: list[str] = []
        scratch.head = scratch.text = ""
        Literal(scratch).read(text.lstrip(), 0, written.append)
        if text.strip() and scratch.phase < literal.Phase.COMPLETE:
            self._set_mode(Mode.STREAMED)
            self.sink.arguments("".join(written))
        else:
            scratch.head, scratch.text, scratch.phase = text, "", 0
            self._become_string()

    def _may_convert(self, text: str) -> bool:
        """Whether text that begins so may be of an allowed type. Once it may not, it never may again."""
        is_container = self._allows(_BRACKETS.get(text[:1], ""))
        is_null = self._allows("null") and any(null.startswith(text) for null in _NULLS)
        has_scalars = any(self._allows(name) for name in ("boolean", "integer", "number"))
        return not text or is_container or is_null or (has_scalars and len(text) <= MAX_SCALAR_CHARS)

    def _convert(self, text: str) -> str | None:
        """The text as JSON of an allowed type, None if it is of none."""
        if self._allows("null") and text in _NULLS:
            return "null"
        if self._allows("boolean") and text.lower() in ("true", "false"):
            return text.lower()
        if self._allows("number") and _NUMBER.fullmatch(text):
            return text
        if self._allows("integer") and _INTEGER.fullmatch(text):
            return text
        return _container(text) if self._allows(_BRACKETS.get(text[:1], "")) else None

    def _allows(self, name: str) -> bool:
        return name in TYPES and bool(self.scratch.depth & (1 << TYPES.index(name)))

    def _set_mode(self, mode: Mode) -> None:
        self.scratch.span = (mode, 0)


def _container(text: str) -> str | None:
    """A list or object, written as JSON or Python, as JSON."""
    written: list[str] = []
    reader = Literal(Scratch())
    end = reader.read(text, 0, written.append)
    return "".join(written) if reader.finish(written.append) and end == len(text) else None
