"""Vocabularies for `bench` without a model."""

from __future__ import annotations

from collections.abc import Sequence


class LetterVocabulary:
    """Ids 0 to 25 are letters, 26 to 50 the letter a with a next letter in one token: re-encoding merges."""

    ids = range(51)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for letter in text:
            number = ord(letter) - ord("a")
            if ids and ids[-1] == 0 and number:
                ids[-1] = 25 + number
            else:
                ids.append(number)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + id) if id < 26 else "a" + chr(97 + id - 25) for id in ids)
