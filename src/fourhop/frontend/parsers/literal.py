"""Python's literals as JSON, turned while they arrive. JSON itself passes too: `true`, `false`, `null` and `\\/` count.

Strings, numbers, booleans, None, lists, tuples (as lists) and dicts with scalar keys; trailing commas may stand. Names,
calls, operators, string prefixes, triple quotes and sets are no literals here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from fourhop.frontend.parsers.table import Scratch

MAX_DEPTH = 64
MAX_SCALAR_CHARS = 64
MAX_CODE = 0x10FFFF

_SPACE = " \t\r\n"
_STRING_STOP = {"'": re.compile(r"['\\]"), '"': re.compile(r'["\\]')}
_SCALAR = re.compile(r"[A-Za-z0-9_.+-]+")
_INTEGER = re.compile(r"[+-]?(0+|[1-9](_?[0-9])*)")
_BASED = re.compile(r"[+-]?0([xX][0-9a-fA-F]+|[oO][0-7]+|[bB][01]+)")
_FLOAT = re.compile(r"[+-]?(?P<whole>[0-9]*)(?P<point>\.(?P<part>[0-9]*))?(?P<power>[eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_ESCAPES |= {character: character for character in "\\'\"/"}
_NUMBER_ESCAPE = re.compile(r"[xuU]([0-9a-fA-F]+)|([0-7]+)")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}", "v": "}"}


class Phase(IntEnum):
    VALUE = 0  # a value is next, or the end of what holds it
    STRING = 1
    ESCAPE = 2
    SCALAR = 3
    AFTER = 4  # a comma, a colon or an end is next
    COMPLETE = 5
    WRONG = 6


class Flag(IntEnum):
    SINGLE = 1  # the string's quotes are single ones
    COMMA = 2  # a comma was read that is not written yet


@dataclass
class Literal:
    """Reads one literal. In `scratch`: `text` is the stack of what is open, one character each (`[`, `(`, and for a
    dict `{` before a key, `:` after it, `v` before and after a value), `head` an unfinished number, word or escape.
    """

    scratch: Scratch

    def read(self, text: str, position: int, write: Callable[[str], None]) -> int:
        """Read up to the literal's end or a mistake (`scratch.phase` tells); where in `text` that is."""
        while position < len(text) and self.scratch.phase < Phase.COMPLETE:
            position = _READ[self.scratch.phase](self, text, position, write)
        return position

    def finish(self, write: Callable[[str], None]) -> bool:
        """The text is over. Whether it was a whole literal."""
        if self.scratch.phase == Phase.SCALAR:
            self._end_scalar(write)
        return self.scratch.phase == Phase.COMPLETE

    def value(self, text: str, position: int, write: Callable[[str], None]) -> int:
        scratch, character = self.scratch, text[position]
        top = scratch.text[-1:]
        if character in _SPACE:
            return position + 1
        if character == _CLOSING.get(top) and top != "v":
            return self._close(position, write)
        if scratch.flags & Flag.COMMA:
            scratch.flags &= ~Flag.COMMA
            write(", ")
        if character in _STRING_STOP:
            scratch.phase = Phase.STRING
            scratch.flags = scratch.flags & ~Flag.SINGLE | (Flag.SINGLE if character == "'" else 0)
            write('"')
        elif character in "[({" and top != "{" and len(scratch.text) < MAX_DEPTH:
            scratch.text += character
            write("{" if character == "{" else "[")
        elif _SCALAR.match(character):
            scratch.phase = Phase.SCALAR
            return position
        else:
            scratch.phase = Phase.WRONG
        return position + 1

    def string(self, text: str, position: int, write: Callable[[str], None]) -> int:
        scratch = self.scratch
        stop = _STRING_STOP["'" if scratch.flags & Flag.SINGLE else '"'].search(text, position)
        end = stop.start() if stop else len(text)
        write(escaped(text[position:end]))
        if stop is None:
            return end
        if stop[0] == "\\":
            scratch.phase = Phase.ESCAPE
        else:
            write('"')
            self._end_value()
        return end + 1

    def escape(self, text: str, position: int, write: Callable[[str], None]) -> int:
        scratch, character = self.scratch, text[position]
        kind = scratch.head[:1] or character
        if kind in "01234567" and (not scratch.head or character in "01234567"):
            scratch.head += character
            if len(scratch.head) < 3:
                return position + 1
        elif kind in _HEX_DIGITS and (not scratch.head or character in "0123456789abcdefABCDEF"):
            scratch.head += character
            if len(scratch.head) <= _HEX_DIGITS[kind]:
                return position + 1
        elif scratch.head and kind not in "01234567":
            scratch.phase = Phase.WRONG
            return position + 1
        elif not scratch.head:
            write(escaped(_ESCAPES.get(character, "\\" + character)))
            scratch.phase = Phase.STRING
            return position + 1
        else:
            position -= 1  # The character that ends an octal number is not part of it.
        return self._end_number_escape(position, write)

    def scalar(self, text: str, position: int, write: Callable[[str], None]) -> int:
        found = _SCALAR.match(text, position)
        if found is None:
            self._end_scalar(write)
            return position
        self.scratch.head += found[0]
        if len(self.scratch.head) > MAX_SCALAR_CHARS:
            self.scratch.head = ""
            self.scratch.phase = Phase.WRONG
        return found.end()

    def after(self, text: str, position: int, write: Callable[[str], None]) -> int:
        scratch, character = self.scratch, text[position]
        top = scratch.text[-1:]
        if character in _SPACE:
            return position + 1
        if character == ":" and top == ":":
            write(": ")
            scratch.text = scratch.text[:-1] + "v"
            scratch.phase = Phase.VALUE
        elif character == "," and top in ("[", "(", "v"):
            scratch.flags |= Flag.COMMA
            scratch.text = scratch.text[:-1] + ("{" if top == "v" else top)
            scratch.phase = Phase.VALUE
        elif character == _CLOSING.get(top):
            return self._close(position, write)
        else:
            scratch.phase = Phase.WRONG
        return position + 1

    def _close(self, position: int, write: Callable[[str], None]) -> int:
        scratch = self.scratch
        write("}" if scratch.text[-1] in "{v" else "]")
        scratch.text = scratch.text[:-1]
        scratch.flags &= ~Flag.COMMA
        self._end_value()
        return position + 1

    def _end_value(self) -> None:
        scratch = self.scratch
        if scratch.text.endswith("{"):
            scratch.text = scratch.text[:-1] + ":"
        scratch.phase = Phase.AFTER if scratch.text else Phase.COMPLETE

    def _end_scalar(self, write: Callable[[str], None]) -> None:
        value, self.scratch.head = _scalar(self.scratch.head), ""
        if value is None:
            self.scratch.phase = Phase.WRONG
            return
        write(f'"{value}"' if self.scratch.text.endswith("{") else value)
        self._end_value()

    def _end_number_escape(self, position: int, write: Callable[[str], None]) -> int:
        scratch = self.scratch
        found, scratch.head = _NUMBER_ESCAPE.fullmatch(scratch.head), ""
        code = (int(found[1], 16) if found[1] else int(found[2], 8)) if found else MAX_CODE + 1
        if code > MAX_CODE:
            scratch.phase = Phase.WRONG
            return position + 1
        # Half a surrogate pair cannot be text, but JSON can spell it.
        write(f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else escaped(chr(code)))
        scratch.phase = Phase.STRING
        return position + 1


_READ: dict[int, Callable[[Literal, str, int, Callable[[str], None]], int]] = {
    Phase.VALUE: Literal.value,
    Phase.STRING: Literal.string,
    Phase.ESCAPE: Literal.escape,
    Phase.SCALAR: Literal.scalar,
    Phase.AFTER: Literal.after,
}


def escaped(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _scalar(text: str) -> str | None:
    """A number or a word as JSON, None if it is neither."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return str(int(text))
    if _BASED.fullmatch(text):
        return str(int(text, 0))
    found = _FLOAT.fullmatch(text)
    if found is None or not (found["whole"] or found["part"]) or not (found["point"] or found["power"]):
        return None
    sign = "-" if text.startswith("-") else ""
    part = f".{found['part'] or '0'}" if found["point"] else ""
    return f"{sign}{found['whole'].lstrip('0') or '0'}{part}{found['power'] or ''}"
