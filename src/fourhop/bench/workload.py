"""What is asked: prompts as token ids, in conversations of one or more turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol


class Vocabulary(Protocol):
    """The tokens that prompts are made of, and the way between ids and text."""

    @property
    def ids(self) -> Sequence[int]:
        """Ordinary tokens: none that is added beside the vocabulary, such as an end or a role."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""


@dataclass(frozen=True)
class Turn:
    """What a user says: new token ids, or a text of its own that they are the tokens of; and the answer's length."""

    ids: Sequence[int]
    num_output: int
    text: str | None = None


@dataclass(frozen=True)
class Job:
    """One conversation. `at_s` is when its file says that it began; None if that is for the schedule to say."""

    turns: tuple[Turn, ...]
    at_s: float | None = None


def draw_ids(vocabulary: Vocabulary, key: str, num: int) -> list[int]:
    """Tokens that follow from `key` alone; those of different keys share no beginning, for all practical purposes."""
    return Random(key).choices(vocabulary.ids, k=num)


def warm_up(jobs: Sequence[Job], vocabulary: Vocabulary, seed: int, num: int) -> list[Job]:
    """Jobs as long as the first turns of `jobs`, with prompts of their own: what they leave in a cache helps none."""
    lengths = [(len(job.turns[0].ids), job.turns[0].num_output) for job in jobs] or [(1, 1)]
    taken = [lengths[place % len(lengths)] for place in range(num)]
    return [
        Job((Turn(draw_ids(vocabulary, f"{seed}/warm-up/{place}", num_input), num_output),))
        for place, (num_input, num_output) in enumerate(taken)
    ]


def text_of(ids: Sequence[int], vocabulary: Vocabulary, key: str) -> str:
    """A text of as many tokens as there are ids, or as near to it as re-encoding lets it come.

    Decoding and encoding again merges or splits tokens; what is too long is cut, what is too short gets more.
    """
    wanted, current = len(ids), list(ids)
    best, best_gap = vocabulary.decode(current), -1
    for attempt in range(10):
        text = vocabulary.decode(current)
        again = vocabulary.encode(text)
        gap = abs(len(again) - wanted)
        if best_gap < 0 or gap < best_gap:
            best, best_gap = text, gap
        if gap == 0:
            break
        current = again[:wanted] + draw_ids(vocabulary, f"{key}/{attempt}", max(0, wanted - len(again)))
    return best
