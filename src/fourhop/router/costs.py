"""What an engine's work takes, learned from what it did: prefill by new tokens, steps by streams, hand-over by tokens.

Every cost is a straight line that is fitted to what was observed, the newest counting most. An engine of which nothing
is known yet is taken to be like the others. Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite

DECAY = 0.9
"""What an observation counts less with each one that follows: about the last ten matter."""

ANCHOR = 0.02
"""Weight, beside that of all observations, of the guess at what no work takes: it decides where all are alike."""

OVERLAP = 0.1
"""Prompts that were computed for more than this part of their time together count as one piece of work."""

MAX_TOGETHER = 16

IDLE_SHARE = 0.0001
"""By so much of itself what an idle engine takes is believed to grow with every answer that took longer."""

CACHE_SHARE = 0.4
OUTPUT_SHARE = 0.05
"""What the newest prompt counts in the trust in a cache, and at least the newest answer in the usual length."""

FIRST_GUESS = 4
"""The guess at the usual length counts as so many answers: those that end first are short."""


class Line:
    """Seconds as `a + b * amount`, neither of them negative: exponentially weighted least squares.

    `idle_share` is the part of a typical time that no amount at all would take, believed until amounts differ.
    Without observations of its own a line is its parent's.
    """

    def __init__(self, idle_share: float, parent: Line | None = None) -> None:
        self._idle_share = idle_share
        self._parent = parent
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._fit: tuple[float, float] | None = None

    @property
    def is_known(self) -> bool:
        return self._weight > 0.0

    def learn(self, amount: float, seconds: float) -> None:
        """Take in one observation. What cannot be one (an engine may say anything) is not taken."""
        if not (0.0 <= amount < 1e9 and 0.0 <= seconds < 1e6):
            return
        self._weight = self._weight * DECAY + 1.0
        self._x = self._x * DECAY + amount
        self._y = self._y * DECAY + seconds
        self._xx = self._xx * DECAY + amount * amount
        self._xy = self._xy * DECAY + amount * seconds
        self._fit = None

    def at(self, amount: float) -> float:
        """Seconds that this amount is expected to take; 0 as long as nothing at all is known."""
        fit = self._fit
        if fit is None:
            if not self._weight:
                return 0.0 if self._parent is None else self._parent.at(amount)
            fit = self._fit = self._solve()
        return fit[0] + fit[1] * amount

    def _solve(self) -> tuple[float, float]:
        """Intercept and slope; the parent's observations count as one of ours."""
        weight, x, y, xx, xy = self._weight, self._x, self._y, self._xx, self._xy
        other = self._parent
        if other is not None and other._weight:
            part = 1.0 / other._weight
            weight, x, y = weight + 1.0, x + other._x * part, y + other._y * part
            xx, xy = xx + other._xx * part, xy + other._xy * part
        mean = y / weight
        if xx == 0.0:
            return mean, 0.0
        anchor = ANCHOR * weight
        total, y = weight + anchor, y + anchor * self._idle_share * mean
        slope = (total * xy - x * y) / (total * xx - x * x)
        if slope <= 0.0 or not isfinite(slope):
            return mean, 0.0
        intercept = (y - slope * x) / total
        return (intercept, slope) if intercept >= 0.0 else (0.0, xy / xx)


@dataclass
class EngineCosts:
    """One engine's costs; those of all engines together when it is the `common` of others.

    `prefill` is by tokens that are not cached, `step` (the time from one token to the next) by streams, `handover`
    (from the end of prefill to the first token that this engine decodes) by tokens of the prompt. `busy_s` is
    the time that it was seen to prefill, all in all; `cache_trust` is the part
    of the tokens that it was expected to have cached which it had, `num_output` how many tokens an answer usually has,
    `idle_step_s` what a token takes a stream that nothing disturbs.
    """

    common: EngineCosts | None = None
    prefill: Line = field(init=False)
    step: Line = field(init=False)
    handover: Line = field(init=False)
    busy_s: float = 0.0
    cache_trust: float = 1.0
    num_output: float = 128.0
    idle_step_s: float = inf
    _num_answers: int = 0
    _tokens_together: int = 0
    _num_together: int = 0
    _since_s: float = 0.0
    _until_s: float = float("-inf")

    def __post_init__(self) -> None:
        common = self.common
        self.prefill = Line(0.0, None if common is None else common.prefill)
        self.step = Line(0.9, None if common is None else common.step)
        self.handover = Line(0.5, None if common is None else common.handover)

    @property
    def is_known(self) -> bool:
        """True once a prompt and an answer were seen."""
        return self.prefill.is_known and self.step.is_known

    def note_prefill(self, num_tokens: int, started_s: float, done_s: float) -> None:
        """A prompt was computed between these times.

        Prompts that were computed together, in one step or in turns, are one observation of all their tokens: it is
        made when the next one turns out not to be part of it, or by `settle`.
        """
        if not started_s <= done_s:
            return
        begun_s = max(started_s, self._until_s)
        overlaps = self._until_s - started_s > OVERLAP * (done_s - started_s)
        if not overlaps or (self._num_together >= MAX_TOGETHER and begun_s < done_s):
            self.settle()
        if not self._num_together:
            if begun_s >= done_s:
                return  # within what is settled already
            self._since_s = begun_s
        self._tokens_together += num_tokens
        self._num_together += 1
        self._until_s = max(self._until_s, done_s)
        self.busy_s += max(0.0, done_s - begun_s)

    def settle(self) -> None:
        """Nothing more belongs to the prompts that were computed last."""
        if not self._num_together:
            return
        for costs in self._learners():
            costs.prefill.learn(self._tokens_together, self._until_s - self._since_s)
        self._tokens_together = self._num_together = 0

    def note_step(self, num_streams: int, seconds: float) -> None:
        for costs in self._learners():
            costs.step.learn(num_streams, seconds)

    def note_pace(self, seconds: float) -> None:
        """A stream took so long a token, all that kept it waiting included: at best what an idle engine takes."""
        for costs in self._learners():
            costs.idle_step_s = min(seconds, costs.idle_step_s * (1.0 + IDLE_SHARE))

    def note_handover(self, num_tokens: int, seconds: float) -> None:
        for costs in self._learners():
            costs.handover.learn(num_tokens, seconds)

    def note_cached(self, num_expected: int, num_cached: int) -> None:
        """A prompt of which the engine was expected to have some turned out to be cached so far."""
        if num_expected > 0:
            self.cache_trust += (min(1.0, num_cached / num_expected) - self.cache_trust) * CACHE_SHARE

    def note_output(self, num_tokens: int) -> None:
        self._num_answers += 1
        self.num_output += (num_tokens - self.num_output) * max(OUTPUT_SHARE, 1.0 / (FIRST_GUESS + self._num_answers))

    def _learners(self) -> tuple[EngineCosts, ...]:
        return (self,) if self.common is None else (self, self.common)
