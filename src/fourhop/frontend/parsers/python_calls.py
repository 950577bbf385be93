"""Calls written as Python: `[f(a=1, b="x"), g()]`, read as they arrive; their arguments become JSON.

The list stands at the beginning. A call is announced when its first argument's name and `=`, or its closing bracket,
was read; until the first call is, the text waits, at most `MAX_HEAD` bytes of it. Text that is no such list is content;
a mistake behind that point cuts the call off, and text after the list is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum

from fourhop.frontend.parsers import literal
from fourhop.frontend.parsers.literal import Literal, escaped
from fourhop.frontend.parsers.table import Scratch, Sink

MAX_HEAD = 768
MAX_NAME_CHARS = 64

_SPACE = " \t\r\n"
_WORD = re.compile(r"[\w.]+")


class Stage(IntEnum):
    START = 0  # before the list
    NAME = 1  # a tool's name, or the list's end
    KEY = 2  # an argument's name, or the call's end
    VALUE = 3
    VALUE_END = 4  # a comma or the call's end
    CALL_END = 5  # a comma or the list's end
    OVER = 6
    CONTENT = 7


class Flag(IntEnum):
    """Besides those of a literal."""

    ANNOUNCED = 16  # the list has a call
    HAS_ARGUMENTS = 32
    IS_OPEN = 64  # the call was announced
    HAS_WORD = 128  # the word that is read has ended


class PythonCalls:
    """In `scratch`: `head` holds the text until the first call is announced, `name` the word that is read; the rest is
    the literal's."""

    def open(self, scratch: Scratch, sink: Sink) -> None:
        """A list needs no beginning."""

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        if scratch.stage == Stage.CONTENT:
            sink.content(text)
        elif scratch.stage < Stage.OVER:
            _Reader(scratch, sink).read(text)

    def close(self, scratch: Scratch, sink: Sink) -> None:
        if scratch.stage < Stage.OVER and not scratch.flags & Flag.ANNOUNCED:
            sink.content(scratch.head)


class _Reader:
    """Reads one piece. Each stage has a method that reads from a position and returns the next one."""

    def __init__(self, scratch: Scratch, sink: Sink) -> None:
        self._scratch = scratch
        self._sink = sink
        self._text = ""
        self._base = 0

    def read(self, text: str) -> None:
        scratch = self._scratch
        self._text, self._base = text, len(scratch.head)
        if not scratch.flags & Flag.ANNOUNCED:
            scratch.head += text
        position = 0
        while position < len(text) and scratch.stage < Stage.OVER:
            position = _READ[scratch.stage](self, position)
        if scratch.stage < Stage.OVER and _is_long(scratch.head):
            self._refuse()

    def start(self, position: int) -> int:
        return self._expect(position, {"[": Stage.NAME})

    def name(self, position: int) -> int:
        end = self._word(position)
        if end > position:
            return end
        if self._text[position] == "(" and _is_name(self._scratch.name):
            self._scratch.stage = Stage.KEY
            self._scratch.text, self._scratch.name = self._scratch.name, ""
            self._scratch.flags &= Flag.ANNOUNCED
            return position + 1
        is_end = self._text[position] == "]" and not self._scratch.name and self._scratch.flags & Flag.ANNOUNCED
        return self._over() if is_end else self._refuse()

    def key(self, position: int) -> int:
        end = self._word(position)
        if end > position:
            return end
        scratch, character = self._scratch, self._text[position]
        if character == "=" and scratch.name.isidentifier():
            if not self._announce(position + 1):
                return len(self._text)
            self._sink.arguments((", " if scratch.flags & Flag.HAS_ARGUMENTS else "{") + f'"{escaped(scratch.name)}": ')
            scratch.stage, scratch.name, scratch.text, scratch.phase = Stage.VALUE, "", "", 0
            scratch.flags = scratch.flags & (Flag.ANNOUNCED | Flag.IS_OPEN) | Flag.HAS_ARGUMENTS
            return position + 1
        if character == ")" and not scratch.name:
            return self._end_call(position) if self._announce(position + 1) else len(self._text)
        return self._refuse()

    def value(self, position: int) -> int:
        end = Literal(self._scratch).read(self._text, position, self._sink.arguments)
        if self._scratch.phase == literal.Phase.WRONG:
            return self._refuse()
        if self._scratch.phase == literal.Phase.COMPLETE:
            self._scratch.stage = Stage.VALUE_END
        return end

    def value_end(self, position: int) -> int:
        if self._text[position] == ")":
            return self._end_call(position)
        return self._expect(position, {",": Stage.KEY})

    def call_end(self, position: int) -> int:
        if self._text[position] == "]":
            return self._over()
        return self._expect(position, {",": Stage.NAME})

    def _expect(self, position: int, stages: dict[str, Stage]) -> int:
        character = self._text[position]
        if character not in _SPACE:
            if character not in stages:
                return self._refuse()
            self._scratch.stage = stages[character]
        return position + 1

    def _word(self, position: int) -> int:
        """Read on in a word and the space around it; the same position if neither is there."""
        scratch = self._scratch
        if self._text[position] in _SPACE:
            scratch.flags |= Flag.HAS_WORD if scratch.name else 0
            return position + 1
        found = _WORD.match(self._text, position)
        if found is None or scratch.flags & Flag.HAS_WORD:
            return position
        scratch.name += found[0]
        return found.end() if len(scratch.name) <= MAX_NAME_CHARS else self._refuse()

    def _announce(self, end: int) -> bool:
        """Begin the call whose name was read, once. False if its beginning came too late."""
        scratch = self._scratch
        if not scratch.flags & Flag.IS_OPEN:
            # The limit counts the text up to here, wherever the pieces were cut.
            if not scratch.flags & Flag.ANNOUNCED and _is_long(scratch.head[: self._base + end]):
                self._refuse()
                return False
            self._sink.begin_call(scratch.text)
            scratch.text = scratch.head = ""
            scratch.flags |= Flag.ANNOUNCED | Flag.IS_OPEN
        return True

    def _end_call(self, position: int) -> int:
        scratch = self._scratch
        self._sink.arguments("}" if scratch.flags & Flag.HAS_ARGUMENTS else "{}")
        self._sink.complete_call()
        scratch.flags = Flag.ANNOUNCED
        scratch.stage, scratch.name = Stage.CALL_END, ""
        return position + 1

    def _over(self) -> int:
        self._scratch.stage = Stage.OVER
        return len(self._text)

    def _refuse(self) -> int:
        scratch = self._scratch
        if not scratch.flags & Flag.ANNOUNCED:
            self._sink.content(scratch.head)
        scratch.stage = Stage.OVER if scratch.flags & Flag.ANNOUNCED else Stage.CONTENT
        scratch.head = scratch.text = scratch.name = ""
        return len(self._text)


_READ: dict[int, Callable[[_Reader, int], int]] = {
    Stage.START: _Reader.start,
    Stage.NAME: _Reader.name,
    Stage.KEY: _Reader.key,
    Stage.VALUE: _Reader.value,
    Stage.VALUE_END: _Reader.value_end,
    Stage.CALL_END: _Reader.call_end,
}


def _is_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _is_long(head: str) -> bool:
    return len(head.encode()) > MAX_HEAD
