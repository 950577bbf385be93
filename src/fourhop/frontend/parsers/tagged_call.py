"""A call written in tags, one argument each: `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

The markers between the parts are the family's table; a body here says what the text between two of them is. Values have
no types of their own: they get those of the tool's schema (`values`).

The call is announced when the marker behind its name was read. A name that is none makes the text content, without its
markers. Arguments go out as JSON, each one as soon as its value allows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from fourhop.frontend.parsers.literal import escaped
from fourhop.frontend.parsers.named_call import NAME
from fourhop.frontend.parsers.table import Scratch, Sink
from fourhop.frontend.parsers.values import ANY_BUT_STRING, Value

MAX_TAG = 256
"""Bytes of a name or key with what surrounds it."""


class Stage(IntEnum):
    NAME = 0
    BETWEEN = 1  # the call was announced
    KEY = 2
    VALUE = 3
    ENDED = 4
    BROKEN = 5  # the arguments cannot be completed: what follows is lost
    NOT_A_CALL = 6


HAS_ARGUMENTS = 64
"""A flag besides those of a value."""


@dataclass(frozen=True)
class Tags:
    """What a family writes inside its tags. `name` and `key` match the whole text of such a tag, space aside; their
    group `name` is the tool or the argument. A key's group `string` says whether its value is a text: "true" or
    "false". `margin` is what may stand on each side of a value without being a part of it.
    """

    name: re.Pattern[str]
    key: re.Pattern[str]
    margin: str = ""


@dataclass(frozen=True)
class NameTag:
    """The tool's name: the first part of a call."""

    tags: Tags

    def open(self, scratch: Scratch, sink: Sink) -> None:
        """A call begins."""

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        if scratch.stage == Stage.NAME:
            scratch.text += text
            if len(scratch.text.encode()) > MAX_TAG:
                _refuse(scratch, sink)
        elif scratch.stage == Stage.NOT_A_CALL:
            sink.content(text)

    def close(self, scratch: Scratch, sink: Sink) -> None:
        if scratch.stage == Stage.NAME:
            _refuse(scratch, sink)


@dataclass(frozen=True)
class Between:
    """Space between arguments. The part before it has ended."""

    tags: Tags

    def open(self, scratch: Scratch, sink: Sink) -> None:
        _end_part(self.tags, scratch, sink)

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        if scratch.stage == Stage.NOT_A_CALL:
            sink.content(text)

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """A call that stops here is not complete."""


@dataclass(frozen=True)
class KeyTag:
    """An argument's name."""

    tags: Tags

    def open(self, scratch: Scratch, sink: Sink) -> None:
        _end_part(self.tags, scratch, sink)
        if scratch.stage == Stage.BETWEEN:
            scratch.stage = Stage.KEY

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        if scratch.stage == Stage.KEY:
            scratch.text += text
            if len(scratch.text.encode()) > MAX_TAG:
                scratch.stage = Stage.BROKEN
        elif scratch.stage == Stage.NOT_A_CALL:
            sink.content(text)

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """A call that stops here is not complete."""


@dataclass(frozen=True)
class ValueText:
    """An argument's value."""

    tags: Tags

    def open(self, scratch: Scratch, sink: Sink) -> None:
        if scratch.stage != Stage.KEY:
            return
        found = self.tags.key.fullmatch(scratch.text.strip())
        if found is None:
            scratch.stage = Stage.BROKEN
            return
        key = found["name"]
        types = _stated_types(found.groupdict().get("string")) or sink.argument_types(scratch.name, key)
        sink.arguments((", " if scratch.flags & HAS_ARGUMENTS else "{") + f'"{escaped(key)}": ')
        scratch.stage, scratch.text = Stage.VALUE, ""
        scratch.flags |= HAS_ARGUMENTS
        Value(self.tags.margin, scratch, sink).begin(types)

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        if scratch.stage == Stage.VALUE:
            Value(self.tags.margin, scratch, sink).feed(text)
        elif scratch.stage == Stage.NOT_A_CALL:
            sink.content(text)

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """A call that stops here is not complete."""


@dataclass(frozen=True)
class CallEnd:
    """Behind the marker that ends a call, up to the next call."""

    tags: Tags

    def open(self, scratch: Scratch, sink: Sink) -> None:
        _end_part(self.tags, scratch, sink)
        if scratch.stage == Stage.BETWEEN:
            sink.arguments("}" if scratch.flags & HAS_ARGUMENTS else "{}")
            sink.complete_call()
            scratch.stage = Stage.ENDED

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        """Layout between calls goes nowhere."""

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """The call has ended."""


def _end_part(tags: Tags, scratch: Scratch, sink: Sink) -> None:
    """A marker was read: the name is whole, or the value is. A key without a value is left out."""
    if scratch.stage == Stage.NAME:
        found = tags.name.fullmatch(scratch.text.strip())
        if found is None:
            _refuse(scratch, sink)
            return
        scratch.name = found["name"]
        sink.begin_call(scratch.name)
    elif scratch.stage == Stage.VALUE and not Value(tags.margin, scratch, sink).end():
        scratch.stage = Stage.BROKEN
    if scratch.stage < Stage.ENDED:
        scratch.stage, scratch.text = Stage.BETWEEN, ""


def _refuse(scratch: Scratch, sink: Sink) -> None:
    sink.content(scratch.text if scratch.text.strip() else "")
    scratch.stage, scratch.text = Stage.NOT_A_CALL, ""


def _stated_types(string: str | None) -> frozenset[str]:
    """The types that the markup itself states."""
    return {"true": frozenset({"string"}), "false": ANY_BUT_STRING}.get(string or "", frozenset())


PLAIN_NAME = re.compile(f"(?P<name>{NAME})")
QUOTED_NAME = re.compile(rf'"?(?P<name>{NAME})"?')
PLAIN_KEY = re.compile(r"(?P<name>[^<>]+)")
QUOTED_KEY = re.compile(r'"?(?P<name>[^"<>]+)"?')
