"""Several calls as JSON, one after the other or in a list: `[{"name": …}, {…}]`, `{"name": …}; {…}`.

The calls stand at the beginning, after space and an opening bracket, and possibly after a prefix of the family. Text
that begins otherwise is content from its first character on; so is an object that is no call, with all that follows
it. Other text after a call is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from fourhop.frontend.parsers.json_call import MAX_HEAD, JsonCall, Phase
from fourhop.frontend.parsers.table import Scratch, Sink

_SEPARATORS = " \t\r\n,;[]"


class Stage(IntEnum):
    LEAD = 0  # before the first object
    OBJECT = 1
    BETWEEN = 2  # after an object
    CONTENT = 3  # what was read is no call
    AFTER = 4  # other text followed a call


@dataclass(frozen=True)
class JsonCalls:
    """`prefixes` are texts that may stand before the first bracket, such as a code fence's beginning."""

    call: JsonCall
    prefixes: tuple[str, ...] = ()

    def open(self, scratch: Scratch, sink: Sink) -> None:
        """Calls need no beginning."""

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        position = 0
        while position < len(text) and scratch.stage < Stage.CONTENT:
            position = self._read(text, position, scratch, sink)
        if scratch.stage == Stage.CONTENT and position < len(text):
            sink.content(text[position:])

    def close(self, scratch: Scratch, sink: Sink) -> None:
        if scratch.stage == Stage.LEAD:
            sink.content(scratch.head)
        elif scratch.stage == Stage.OBJECT:
            self.call.close(scratch, sink)

    def _read(self, text: str, position: int, scratch: Scratch, sink: Sink) -> int:
        """Read one part from `position` on; where the next one begins."""
        if scratch.stage == Stage.LEAD:
            return self._lead(text, scratch, sink)
        if scratch.stage == Stage.BETWEEN:
            return self._between(text, position, scratch)
        end = position + self.call.read(text[position:], scratch, sink)
        if scratch.phase == Phase.NOT_A_CALL:
            scratch.stage = Stage.CONTENT
            return len(text)
        if scratch.phase == Phase.DONE:
            self.call.close(scratch, sink)
            scratch.stage = Stage.BETWEEN
        return end

    def _lead(self, text: str, scratch: Scratch, sink: Sink) -> int:
        brace = text.find("{")
        end = len(text) if brace < 0 else brace
        scratch.head += text[:end]
        lead = "".join(scratch.head.split())
        leads = [prefix + bracket for prefix in ("", *self.prefixes) for bracket in ("", "[")]
        fits = lead in leads if brace >= 0 else any(known.startswith(lead) for known in leads)
        if not fits or len(scratch.head.encode()) > MAX_HEAD:
            sink.content(scratch.head)
            scratch.head = ""
            scratch.stage = Stage.CONTENT
        elif brace >= 0:
            scratch.stage = Stage.OBJECT
        return end

    def _between(self, text: str, position: int, scratch: Scratch) -> int:
        while position < len(text) and text[position] in _SEPARATORS:
            position += 1
        if position < len(text):
            scratch.stage = Stage.OBJECT if text[position] == "{" else Stage.AFTER
            scratch.phase, scratch.depth, scratch.flags = 0, 0, 0
        return position
