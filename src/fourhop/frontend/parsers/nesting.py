"""Where a JSON object or array ends, found as its text arrives. Shared by the bodies that pass JSON on as written."""

from __future__ import annotations

import re

from fourhop.frontend.parsers.table import Scratch

QUOTED = 1  # flag: inside a string
ESCAPED = 2  # flag: after a backslash

_QUOTED_STOP = re.compile(r'["\\]')
_NESTED_STOP = re.compile(r'["{}\[\]]')


def end_of_string(text: str, position: int, scratch: Scratch) -> int:
    """Behind the closing quote, where QUOTED is cleared, or at the end of `text`."""
    while position < len(text):
        if scratch.flags & ESCAPED:
            scratch.flags &= ~ESCAPED
            position += 1
            continue
        match = _QUOTED_STOP.search(text, position)
        if match is None:
            return len(text)
        position = match.end()
        if match[0] == '"':
            scratch.flags &= ~QUOTED
            return position
        scratch.flags |= ESCAPED
    return position


def end_of_nested(text: str, position: int, scratch: Scratch) -> int:
    """Behind the bracket that brings `depth` to 0, or at the end of `text`. Kinds of brackets are not told apart."""
    while position < len(text):
        if scratch.flags & QUOTED:
            position = end_of_string(text, position, scratch)
            continue
        match = _NESTED_STOP.search(text, position)
        if match is None:
            return len(text)
        position = match.end()
        if match[0] == '"':
            scratch.flags |= QUOTED
        elif match[0] in "{[":
            scratch.depth += 1
        else:
            scratch.depth = max(0, scratch.depth - 1)
            if scratch.depth == 0:
                return position
    return position
