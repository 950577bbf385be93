"""Mistral's calls: `[{"name": …}, …]` of the older models, `name[ARGS]{…}` of the newer ones, behind one marker."""

from __future__ import annotations

from dataclasses import dataclass

from fourhop.frontend.parsers.json_calls import JsonCalls, Stage
from fourhop.frontend.parsers.named_call import NamedCall
from fourhop.frontend.parsers.table import Scratch, Sink

NAMED = 9
"""A stage besides those of a list: the text is that of a named call."""


@dataclass(frozen=True)
class MistralCalls:
    """The first character tells which form it is; the part behind `[ARGS]` is the named call's own state."""

    listed: JsonCalls
    named: NamedCall

    def open(self, scratch: Scratch, sink: Sink) -> None:
        """The form is not known yet."""

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        if scratch.stage == Stage.LEAD and not scratch.head:
            text = text.lstrip()
            if text and text[0] not in "[{":
                scratch.stage = NAMED
                self.named.open(scratch, sink)
        body = self.named if scratch.stage == NAMED else self.listed
        if text:
            body.feed(text, scratch, sink)

    def close(self, scratch: Scratch, sink: Sink) -> None:
        body = self.named if scratch.stage == NAMED else self.listed
        body.close(scratch, sink)
