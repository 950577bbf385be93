"""Reading calls that a tool choice forces: JSON without any markup, in the form that `structure` asks for."""

from __future__ import annotations

from dataclasses import dataclass

from fourhop.frontend.parsers import Parsers
from fourhop.frontend.parsers.json_call import JsonCall
from fourhop.frontend.parsers.json_calls import JsonCalls
from fourhop.frontend.parsers.machine import Table
from fourhop.frontend.parsers.nesting import QUOTED, end_of_nested
from fourhop.frontend.parsers.table import Body, Scratch, Sink
from fourhop.wire.openai_chat import ChatCompletionRequest, NamedToolChoice

BEGUN, COMPLETE = 1, 2


def forced_table(request: ChatCompletionRequest, parsers: Parsers) -> Table | None:
    """The table for a request that forces calls, None for others."""
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice):
        return parsers.table_of(Arguments(choice.function.name))
    return parsers.table_of(LIST) if choice == "required" else None


@dataclass(frozen=True)
class Arguments:
    """The whole text is the arguments of one call, a JSON object."""

    name: str

    def open(self, scratch: Scratch, sink: Sink) -> None:
        """The call begins with its first character."""

    def feed(self, text: str, scratch: Scratch, sink: Sink) -> None:
        if not scratch.stage:
            text = text.lstrip()
            if text:
                sink.begin_call(self.name)
                scratch.stage = BEGUN
        if scratch.stage == BEGUN and text:
            end = end_of_nested(text, 0, scratch)
            sink.arguments(text[:end])
            if scratch.depth == 0 and not scratch.flags & QUOTED and text[:end].endswith(("}", "]")):
                scratch.stage = COMPLETE

    def close(self, scratch: Scratch, sink: Sink) -> None:
        if scratch.stage == COMPLETE:
            sink.complete_call()


LIST: Body = JsonCalls(JsonCall(name="name", arguments=("parameters",)))
