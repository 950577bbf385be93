"""Stop strings over a text that arrives in pieces."""

from __future__ import annotations

import msgspec

from fourhop.frontend.phrases import Phrases
from fourhop.wire.derender import Count


class HeldTail(msgspec.Struct, array_like=True):
    """The text that waits: the first `num_chars` characters of stop string `stop`. Small, however long the stop is."""

    stop: Count = 0
    num_chars: Count = 0


class StopMatcher:
    """Lets text through up to the first stop string.

    `hit` is the stop string that was found; from then on nothing passes. Of several, the one that ends first counts.
    """

    def __init__(self, stops: Phrases, held: HeldTail, *, include_stop: bool) -> None:
        self.held = held
        self.hit: str | None = None
        self._stops = stops
        self._has_stops = bool(stops)
        self._include_stop = include_stop

    def feed(self, text: str) -> str:
        """The text that is certain by now not to be part of a stop string, or ends before one."""
        if not self._has_stops:
            return text
        if self.hit is not None:
            return ""
        text = self._take_held() + text
        if found := self._stops.search(text):
            start, end, number = found
            self.hit = self._stops.phrases[number]
            return text[: end if self._include_stop else start]
        num_chars, stop = self._stops.partial(text)
        self.held.stop, self.held.num_chars = stop, num_chars
        return text[: len(text) - num_chars]

    def flush(self) -> str:
        """The held tail: the text it was held for ended, or was broken off by a marker."""
        return self._take_held() if self.hit is None else ""

    def _take_held(self) -> str:
        if not self.held.num_chars:
            return ""
        text = self._stops.phrases[self.held.stop][: self.held.num_chars]
        self.held.stop, self.held.num_chars = 0, 0
        return text
