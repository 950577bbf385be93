"""A call whose name stands before its arguments: `name MARKER {…}`, read as it arrives.

Everything up to the arguments' first brace is the lead; where a marker stood, it holds a `MARK`. A family's pattern
finds the name in the lead, and from then on the arguments pass as the raw JSON that the model wrote. A lead that does
not fit is no call but content, without its markers. After the arguments nothing but layout is expected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from fourhop.frontend.parsers.nesting import end_of_nested
from fourhop.frontend.parsers.table import Scratch, Sink

MAX_LEAD = 512
"""Bytes."""
MARK = "\x1f"
"""Unit separator: no text of a model."""
NAME = r"""[^\s<>{}\[\]()"'`,:;=\x1f]{1,128}"""
"""What a tool may be called. Function names have less, qualified names dots, slashes and hyphens."""


class Phase(IntEnum):
    LEAD = 0
    ARGUMENTS = 1
    DONE = 2
    NOT_A_CALL = 3


@dataclass(frozen=True)
class NamedCall:
    """`pattern` must match the whole lead. Its group `name` is the tool; a group `id` is the call's id."""

    pattern: re.Pattern[str]

    def open(self, scratch: Scratch, sink: Sink) -> None:
        if scratch.phase == Phase.LEAD:
            scratch.text += MARK

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        start = 0
        if scratch.phase == Phase.LEAD:
            start = self._lead(text, scratch, sink)
        if scratch.phase == Phase.ARGUMENTS and start < len(text):
            end = end_of_nested(text, start, scratch)
            sink.arguments(text[start:end])
            if scratch.depth == 0:
                scratch.phase = Phase.DONE
        elif scratch.phase == Phase.NOT_A_CALL:
            sink.content(text[start:])

    def close(self, scratch: Scratch, sink: Sink) -> None:
        if scratch.phase == Phase.LEAD:
            refuse(scratch, sink)
        elif scratch.phase == Phase.DONE:
            sink.complete_call()

    def announce(self, scratch: Scratch, sink: Sink) -> bool:
        """Begin the call that the lead names, if it names one."""
        found = self.pattern.fullmatch(scratch.text)
        if found is None:
            return False
        sink.begin_call(found["name"], found.groupdict().get("id") or "")
        scratch.phase, scratch.text = Phase.ARGUMENTS, ""
        return True

    def _lead(self, text: str, scratch: Scratch, sink: Sink) -> int:
        """Read the lead; where in `text` the arguments, or text that is no call's, begin."""
        brace = text.find("{")
        end = len(text) if brace < 0 else brace
        scratch.text += text[:end]
        if len(scratch.text.encode()) > MAX_LEAD or (brace >= 0 and not self.announce(scratch, sink)):
            refuse(scratch, sink)
        return end


@dataclass(frozen=True)
class NamedCallEnd:
    """After the marker that ends a call. One that got its name but no arguments has none."""

    call: NamedCall

    def open(self, scratch: Scratch, sink: Sink) -> None:
        if scratch.phase == Phase.LEAD and self.call.announce(scratch, sink):
            sink.arguments("{}")
            scratch.phase = Phase.DONE
        self.call.close(scratch, sink)
        # Another end of the same call, or the output's, changes nothing.
        scratch.phase = Phase.ARGUMENTS

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        """Layout between calls goes nowhere."""

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """The call has ended."""


def refuse(scratch: Scratch, sink: Sink) -> None:
    """The lead is no call's: it is content."""
    text = scratch.text.replace(MARK, "")
    sink.content(text if text.strip() else "")
    scratch.phase, scratch.text = Phase.NOT_A_CALL, ""
