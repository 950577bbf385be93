"""The one incremental parser: tokens and text in, content, thinking and calls out.

Chunking is invisible: what comes out depends on the tokens alone. A step costs the length of its input; nothing that
was read is read again, except a held prefix of a marker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from fourhop.frontend.detokenize import Tokenizer
from fourhop.frontend.parsers.table import REASONING, Body, Scratch, Sink, State, Target
from fourhop.frontend.phrases import Phrases
from fourhop.wire.derender import Count
from fourhop.wire.errors import StartError


@dataclass(frozen=True)
class Exit:
    """Where a marker leads: to the number of the first pattern that the text before it holds, else to `otherwise`."""

    otherwise: int
    targets: tuple[tuple[re.Pattern[str], int], ...] = ()

    def choose(self, text: str) -> int:
        return next((number for pattern, number in self.targets if pattern.search(text)), self.otherwise)


@dataclass(frozen=True)
class BoundState:
    """A state of a table for one vocabulary: markers as token ids, and as text where they have none."""

    body: Body
    by_id: dict[int, Exit]
    by_text: Phrases
    text_exits: tuple[Exit, ...]
    has_text_markers: bool
    is_reasoning: bool
    continues: bool


@dataclass(frozen=True)
class Table:
    """A table bound to a vocabulary. `numbers` maps a state's name to its place in `states`."""

    states: tuple[BoundState, ...]
    numbers: Mapping[str, int]

    @property
    def has_text_markers(self) -> bool:
        return any(state.has_text_markers for state in self.states)


def bind(states: Mapping[str, State], tokenizer: Tokenizer) -> Table:
    """Look the markers up in the vocabulary. States keep their order, so their numbers mean the same everywhere."""
    numbers = {name: number for number, name in enumerate(states)}
    return Table(tuple(_bind_state(state, numbers, tokenizer) for state in states.values()), numbers)


def spelling_ids(table: Table, tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens that stand inside a marker which is no token itself."""
    spelled = {marker for state in table.states for marker in state.by_text.phrases}
    if not spelled:
        return frozenset()
    texts = {token_id: tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in tokenizer.special_ids}
    return frozenset(i for i, text in texts.items() if text and any(text in marker for marker in spelled))


def _bind_state(state: State, numbers: Mapping[str, int], tokenizer: Tokenizer) -> BoundState:
    ids = {marker: tokenizer.marker_id(marker) for marker in state.on}
    exits = {marker: _exit(target, numbers) for marker, target in state.on.items()}
    spelled = [marker for marker, token_id in ids.items() if token_id is None]
    return BoundState(
        body=state.body,
        by_id={token_id: exits[marker] for marker, token_id in ids.items() if token_id is not None},
        by_text=Phrases(spelled),
        text_exits=tuple(exits[marker] for marker in spelled),
        has_text_markers=bool(spelled),
        is_reasoning=state.body is REASONING,
        continues=state.continues,
    )


def _exit(target: Target, numbers: Mapping[str, int]) -> Exit:
    if isinstance(target, str):
        return Exit(_number(target, numbers))
    targets = tuple((re.compile(pattern), _number(name, numbers)) for pattern, name in target.targets.items())
    return Exit(_number(target.otherwise, numbers), targets)


def _number(state: str, numbers: Mapping[str, int]) -> int:
    if state not in numbers:
        raise StartError(f"a marker leads to the state {state!r}, which the parser's table does not have")
    return numbers[state]


class Position(msgspec.Struct, array_like=True):
    """Where a machine is: its state, the held prefix of a textual marker, and what its body remembers."""

    state: Count = 0
    held: str = ""
    scratch: Scratch = msgspec.field(default_factory=Scratch)


class Machine:
    """Walks one choice through a table. `position` is all it remembers."""

    def __init__(self, table: Table, position: Position, sink: Sink) -> None:
        self.position = position
        self._table = table
        self._sink = sink
        self.state = table.states[position.state]

    def marker(self, token_id: int) -> bool:
        """Take a token as a marker, if it is one here. The text before it must have been fed."""
        leads_to = self.state.by_id.get(token_id)
        if leads_to is None:
            return False
        self._release()
        self._go(leads_to)
        return True

    def text(self, text: str) -> None:
        """Text between markers that are tokens; markers that are text are found in it."""
        while self.position.held or (self.state.has_text_markers and self.state.by_text.begins_in(text)):
            text, self.position.held = self.position.held + text, ""
            found = self.state.by_text.search(text)
            if found is None:
                num_chars, _ = self.state.by_text.partial(text)
                cut = len(text) - num_chars
                text, self.position.held = text[:cut], text[cut:]
                break
            start, end, number = found
            self._feed(text[:start])
            self._go(self.state.text_exits[number])
            text = text[end:]
        self._feed(text)

    def finish(self) -> None:
        """The output is over: what was held is text, and an open call is as whole as it is.

        Inside a call's parts the beginning of a marker was meant as one: it is no argument's text.
        """
        if self.state.continues:
            self.position.held = ""
        self._release()
        self.state.body.close(self.position.scratch, self._sink)

    def _feed(self, text: str) -> None:
        if text:
            self.state.body.feed(text, self.position.scratch, self._sink)

    def _release(self) -> None:
        held, self.position.held = self.position.held, ""
        self._feed(held)

    def _go(self, leads_to: Exit) -> None:
        scratch = self.position.scratch
        target = leads_to.choose(scratch.text)
        state = self._table.states[target]
        if not state.continues:
            self.state.body.close(scratch, self._sink)
            scratch = Scratch()
        self._sink.boundary()
        self.position.state, self.position.scratch, self.state = target, scratch, state
        state.body.open(scratch, self._sink)


def last_marker(
    token_ids: list[int], markers: tuple[str, ...], turns: tuple[str, ...], tokenizer: Tokenizer
) -> str | None:
    """The last of `markers` in the prompt's last turn, None if there is none.

    Reads the ids backwards when the vocabulary holds all markers, else the text of the last `TAIL_TOKENS` tokens.
    """
    ids = {token_id: text for text in markers + turns if (token_id := tokenizer.marker_id(text)) is not None}
    if set(markers) <= set(ids.values()):
        last = next((ids[token_id] for token_id in reversed(token_ids) if token_id in ids), None)
    else:
        pattern = "|".join(re.escape(text) for text in markers + turns)
        found = re.findall(pattern, tokenizer.decode(token_ids[-TAIL_TOKENS:], skip_special_tokens=False))
        last = found[-1] if found else None
    return last if last in markers else None


TAIL_TOKENS = 256
