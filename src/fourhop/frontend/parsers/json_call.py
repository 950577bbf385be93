"""A call written as one JSON object: `{"name": …, "arguments": {…}}`, read as it arrives.

The name is announced when its string is complete, and from then on the arguments pass as the raw text that the model
wrote. Text that turns out to be no such object is content. Until the name is known the text waits, at most `MAX_HEAD`
bytes of it; an object whose name comes later than that, or is longer than `MAX_NAME` bytes, is content too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from fourhop.frontend.parsers.nesting import ESCAPED, QUOTED, end_of_nested, end_of_string
from fourhop.frontend.parsers.table import Scratch, Sink

MAX_HEAD = 1024
MAX_NAME = 256
MAX_KEY_CHARS = 64

_SPACE = " \t\r\n"
_SCALAR_END = re.compile(r"[,}\]\s]")
_SCALAR_START = re.compile(r"[-0-9a-zA-Z]")


class Phase(IntEnum):
    START = 0  # before the object
    KEY_START = 1  # a key or the object's end
    KEY = 2
    COLON = 3
    VALUE_START = 4
    STRING = 5
    NESTED = 6  # inside an array or object
    SCALAR = 7
    VALUE_END = 8  # a comma or the object's end
    DONE = 9
    NOT_A_CALL = 10  # before the name was announced: the text is content
    BROKEN = 11  # after it: what follows is lost


class Flag(IntEnum):
    """Besides `QUOTED` and `ESCAPED`."""

    NAME = 4  # the value is the name's
    ARGUMENTS = 8  # the value is the arguments'
    ANNOUNCED = 16
    HAS_ARGUMENTS = 32  # their value is complete


_VALUE_FLAGS = QUOTED | ESCAPED | Flag.NAME | Flag.ARGUMENTS


@dataclass(frozen=True)
class JsonCall:
    """`name` is the key of the call's name, `arguments` are the keys that the arguments may have."""

    name: str
    arguments: tuple[str, ...]

    def open(self, scratch: Scratch, sink: Sink) -> None:
        """An object needs no beginning."""

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        self.read(text, scratch, sink)

    def read(self, text: str, scratch: Scratch, sink: Sink) -> int:
        """Read up to the object's end; returns where in `text` that is."""
        if scratch.phase == Phase.NOT_A_CALL:
            sink.content(text)
        elif scratch.phase < Phase.DONE:
            return _Reader(self, scratch, sink).read(text)
        return len(text)

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """Complete arguments make a call, whether or not the object's last brace was written."""
        if scratch.phase == Phase.NOT_A_CALL:
            return
        if not scratch.flags & Flag.ANNOUNCED:
            sink.content(scratch.head if scratch.head.strip() else "")
        elif scratch.phase == Phase.DONE or scratch.flags & Flag.HAS_ARGUMENTS:
            sink.complete_call()


class _Reader:
    """Reads one piece of the object. Each phase has a method that reads from a position and returns the next one."""

    def __init__(self, call: JsonCall, scratch: Scratch, sink: Sink) -> None:
        self._call = call
        self._scratch = scratch
        self._sink = sink
        self._text = ""
        self._base = 0

    def read(self, text: str) -> int:
        scratch = self._scratch
        self._text, self._base = text, len(scratch.head)
        if not scratch.flags & Flag.ANNOUNCED:
            scratch.head += text
        position = 0
        while position < len(text) and scratch.phase < Phase.DONE:
            position = _READ[scratch.phase](self, position)
        if scratch.phase < Phase.DONE and _is_long(scratch.head):
            self._refuse()
        return position

    def start(self, position: int) -> int:
        return self._expect(position, {"{": Phase.KEY_START})

    def key_start(self, position: int) -> int:
        self._scratch.text = ""
        return self._expect(position, {'"': Phase.KEY, "}": Phase.DONE})

    def key(self, position: int) -> int:
        end = self._string(position, Phase.COLON)
        self._scratch.text = (self._scratch.text + self._text[position:end])[:MAX_KEY_CHARS]
        return end

    def colon(self, position: int) -> int:
        end = self._expect(position, {":": Phase.VALUE_START})
        if self._scratch.phase == Phase.VALUE_START:
            key = _string_value('"' + self._scratch.text)
            first_arguments = not self._scratch.flags & Flag.HAS_ARGUMENTS
            if key == self._call.name and not self._scratch.flags & Flag.ANNOUNCED:
                self._scratch.flags |= Flag.NAME
            elif key in self._call.arguments and first_arguments:
                self._scratch.flags |= Flag.ARGUMENTS
            self._scratch.text = ""
        return end

    def value_start(self, position: int) -> int:
        character = self._text[position]
        if character in _SPACE:
            return position + 1
        scratch = self._scratch
        if character == '"':
            scratch.phase = Phase.STRING
        elif scratch.flags & Flag.NAME:
            return self._refuse()
        elif character in "{[":
            scratch.phase, scratch.depth = Phase.NESTED, 1
        elif _SCALAR_START.match(character):
            scratch.phase = Phase.SCALAR
        else:
            return self._refuse()
        self._begin_value(position)
        return position + 1

    def string(self, position: int) -> int:
        end = self._string(position, Phase.VALUE_END)
        if self._scratch.flags & Flag.NAME:
            self._scratch.text += self._text[position:end]
            if len(self._scratch.text.encode()) > MAX_NAME:
                return self._refuse()
        return self._pass_on(position, end)

    def nested(self, position: int) -> int:
        end = end_of_nested(self._text, position, self._scratch)
        if self._scratch.depth == 0:
            self._scratch.phase = Phase.VALUE_END
        return self._pass_on(position, end)

    def scalar(self, position: int) -> int:
        match = _SCALAR_END.search(self._text, position)
        if match is not None:
            self._scratch.phase = Phase.VALUE_END
        return self._pass_on(position, match.start() if match else len(self._text))

    def value_end(self, position: int) -> int:
        return self._expect(position, {",": Phase.KEY_START, "}": Phase.DONE})

    def _expect(self, position: int, phases: dict[str, Phase]) -> int:
        """Skip space, then go where the character leads; any other character breaks the object."""
        character = self._text[position]
        if character in _SPACE:
            return position + 1
        if character not in phases:
            return self._refuse()
        self._scratch.phase = phases[character]
        return self._end_object(position + 1) if phases[character] == Phase.DONE else position + 1

    def _string(self, position: int, after: Phase) -> int:
        """Read up to the closing quote, which leads to `after`, or to the end of the piece."""
        scratch = self._scratch
        scratch.flags |= QUOTED
        end = end_of_string(self._text, position, scratch)
        if not scratch.flags & QUOTED:
            scratch.phase = after
        return end

    def _begin_value(self, position: int) -> None:
        scratch = self._scratch
        if scratch.flags & Flag.ARGUMENTS:
            scratch.span = (self._base + position, 0)
            if scratch.flags & Flag.ANNOUNCED:
                self._sink.arguments(self._text[position])

    def _pass_on(self, position: int, end: int) -> int:
        """Text of a value: the arguments' goes out, or waits in the head for the name."""
        scratch = self._scratch
        if scratch.flags & Flag.ARGUMENTS and scratch.flags & Flag.ANNOUNCED and end > position:
            self._sink.arguments(self._text[position:end])
        if scratch.phase == Phase.VALUE_END:
            self._end_value(end)
        return end

    def _end_value(self, end: int) -> None:
        scratch = self._scratch
        flags, scratch.flags = scratch.flags, scratch.flags & ~_VALUE_FLAGS
        if flags & Flag.ARGUMENTS:
            scratch.flags |= Flag.HAS_ARGUMENTS
            scratch.span = (scratch.span[0], self._base + end)
        elif flags & Flag.NAME:
            self._announce(self._base + end)

    def _announce(self, head_chars: int) -> None:
        scratch = self._scratch
        name = _string_value('"' + scratch.text)
        # The limit counts the text before the name's end, wherever the pieces were cut.
        if not name or _is_long(scratch.head[:head_chars]):
            self._refuse()
            return
        self._sink.begin_call(name)
        if scratch.flags & Flag.HAS_ARGUMENTS:
            self._sink.arguments(scratch.head[slice(*scratch.span)])
        scratch.flags |= Flag.ANNOUNCED
        scratch.text = scratch.head = ""
        scratch.span = (0, 0)

    def _end_object(self, end: int) -> int:
        scratch = self._scratch
        if not scratch.flags & Flag.ANNOUNCED:
            return self._refuse()
        if not scratch.flags & Flag.HAS_ARGUMENTS:
            self._sink.arguments("{}")
        return end

    def _refuse(self) -> int:
        """The text breaks the object: without a name it is no call, with one the call stays as far as it is."""
        scratch = self._scratch
        if scratch.flags & Flag.ANNOUNCED:
            scratch.phase = Phase.BROKEN
        else:
            scratch.phase = Phase.NOT_A_CALL
            self._sink.content(scratch.head)
            scratch.head = scratch.text = ""
        return len(self._text)


_READ: dict[int, Callable[[_Reader, int], int]] = {
    Phase.START: _Reader.start,
    Phase.KEY_START: _Reader.key_start,
    Phase.KEY: _Reader.key,
    Phase.COLON: _Reader.colon,
    Phase.VALUE_START: _Reader.value_start,
    Phase.STRING: _Reader.string,
    Phase.NESTED: _Reader.nested,
    Phase.SCALAR: _Reader.scalar,
    Phase.VALUE_END: _Reader.value_end,
}


def _is_long(head: str) -> bool:
    return len(head.encode()) > MAX_HEAD


def _string_value(literal: str) -> str | None:
    """The text of a JSON string literal, None if it is not one."""
    try:
        return msgspec.json.decode(literal, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None
