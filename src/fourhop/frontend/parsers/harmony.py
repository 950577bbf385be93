"""OpenAI's harmony: messages with a header each, `<|channel|>CHANNEL to=functions.NAME <|message|>TEXT<|end|>`.

The header says what the text is: a call if it names a function as the recipient, thinking in the `analysis` channel or
for another recipient, else content.
"""

from __future__ import annotations

import re
from enum import IntEnum

from fourhop.frontend.parsers.named_call import MARK, NAME
from fourhop.frontend.parsers.nesting import end_of_nested
from fourhop.frontend.parsers.table import CONTENT, LAYOUT, REASONING, Body, Fork, Scratch, Sink, State, Target

MAX_HEADER_CHARS = 300

_RECIPIENT = re.compile(rf"to=functions\.(?P<name>{NAME})")
_TO = " to="


class Beginning:
    """Text outside of a message: content, except that a header may begin with its recipient."""

    def open(self, scratch: Scratch, sink: Sink) -> None:
        """Text needs no beginning."""

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        scratch.text += text
        is_header = scratch.text.startswith(_TO) and len(scratch.text) <= MAX_HEADER_CHARS
        if scratch.stage or not (is_header or _TO.startswith(scratch.text)):
            self.close(scratch, sink)
            scratch.stage = 1

    def close(self, scratch: Scratch, sink: Sink) -> None:
        text, scratch.text = scratch.text, ""
        sink.content(text)


class Header:
    """Role, channel, recipient and type; a `MARK` stands where a marker divides them."""

    def open(self, scratch: Scratch, sink: Sink) -> None:
        scratch.text += MARK

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        scratch.text = (scratch.text + text)[:MAX_HEADER_CHARS]

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """A header is no text."""


class Phase(IntEnum):
    START = 0
    OBJECT = 1
    DONE = 2
    OTHER = 3  # the arguments are no JSON object: they pass as they are, and are complete where the message ends


class Arguments:
    """The text of a call: its arguments, passed on as written."""

    def open(self, scratch: Scratch, sink: Sink) -> None:
        found = _RECIPIENT.search(scratch.text)
        scratch.text = ""
        if found is not None:
            sink.begin_call(found["name"])
        else:
            scratch.phase = Phase.DONE

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        if scratch.phase == Phase.START:
            text = text.lstrip()
            if not text:
                return
            scratch.phase = Phase.OBJECT if text.startswith("{") else Phase.OTHER
        if scratch.phase == Phase.OTHER:
            sink.arguments(text)
        elif scratch.phase == Phase.OBJECT:
            sink.arguments(text[: end_of_nested(text, 0, scratch)])
            scratch.phase = Phase.OBJECT if scratch.depth else Phase.DONE

    def close(self, scratch: Scratch, sink: Sink) -> None:
        if scratch.phase == Phase.DONE:
            sink.complete_call()


class ArgumentsEnd:
    """Behind a call's message, up to the next one. A call without a text has no arguments."""

    def open(self, scratch: Scratch, sink: Sink) -> None:
        if scratch.phase == Phase.START:
            sink.arguments("{}")
        if scratch.phase != Phase.OBJECT:
            sink.complete_call()

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        """Layout goes nowhere."""

    def close(self, scratch: Scratch, sink: Sink) -> None:
        """The call has ended."""


def harmony_states(call: Body) -> dict[str, State]:
    """The states of harmony, where the text of a call's message is `call`."""
    markers = ("<|end|>", "<|return|>", "<|call|>")
    begins: dict[str, Target] = {"<|start|>": "role", "<|channel|>": "role"}
    ends: dict[str, Target] = dict.fromkeys(markers, "between")
    ends_call: dict[str, Target] = dict.fromkeys(markers, "call_end")
    fork = Fork({r"to=functions\.": "call", rf"to=|{MARK}\s*analysis": "analysis"}, otherwise="final")
    header: dict[str, Target] = {
        "<|start|>": "role",
        "<|channel|>": "header",
        "<|constrain|>": "header",
        "<|message|>": fork,
    }
    return {
        "content": State(Beginning(), {"<|start|>": "role", "<|channel|>": "header", **ends}),
        "role": State(Header(), header),
        "header": State(Header(), header, continues=True),
        "analysis": State(REASONING, {**begins, **ends}),
        "final": State(CONTENT, {**begins, **ends}),
        "call": State(call, {**begins, **ends_call}, continues=True),
        "call_end": State(ArgumentsEnd() if call is not CONTENT else LAYOUT, begins, continues=True),
        "between": State(LAYOUT, begins),
    }
