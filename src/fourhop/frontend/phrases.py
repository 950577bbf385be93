"""Finding fixed phrases in text that arrives in pieces: markers and stop strings."""

from __future__ import annotations

import re
from collections.abc import Sequence


class Phrases:
    """A set of non-empty phrases. Only a suffix that is a proper prefix of some phrase ever has to wait.

    Building costs the total length of the phrases; `search` and `partial` cost the length of the text they get.
    """

    def __init__(self, phrases: Sequence[str]) -> None:
        self.phrases = tuple(phrases)
        self._longest = max(map(len, self.phrases), default=0)
        self._first = (
            re.compile("[" + "".join(re.escape(phrase[0]) for phrase in self.phrases) + "]") if phrases else None
        )

    def __bool__(self) -> bool:
        return bool(self.phrases)

    def begins_in(self, text: str) -> bool:
        """Whether the first character of a phrase is in `text`: without one, nothing is found and nothing waits."""
        return self._first is not None and self._first.search(text) is not None

    def search(self, text: str) -> tuple[int, int, int] | None:
        """The phrase that ends first (the longest of those): its start and end in `text`, and its number."""
        hits = ((text.find(phrase), len(phrase), number) for number, phrase in enumerate(self.phrases))
        found = [(start + size, start, number) for start, size, number in hits if start >= 0]
        if not found:
            return None
        end, start, number = min(found)
        return start, end, number

    def partial(self, text: str) -> tuple[int, int]:
        """The longest suffix of `text` that is a proper prefix of a phrase: its length and that phrase's number."""
        if self._first is None:
            return 0, 0
        for match in self._first.finditer(text, max(0, len(text) - self._longest + 1)):
            suffix = text[match.start() :]
            for number, phrase in enumerate(self.phrases):
                if len(suffix) < len(phrase) and phrase.startswith(suffix):
                    return len(suffix), number
        return 0, 0
