"""Who is let in next, and who cannot be served in time: the queue before the engines.

The order is by priority, then by deadline, then by arrival. Pure: no I/O, no clock.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from math import inf


@dataclass(order=True)
class Waiter:
    """A request that waits. `deadline_s` is when its first token is due, `prefill_s` what its prompt will take,
    `itl_s` its target between tokens (0: none), `num_streams` how many choices it has.

    A lower `priority` goes first, as in vLLM; `number` tells who came first.
    """

    priority: int
    deadline_s: float
    number: int
    prefill_s: float = field(compare=False, default=0.0)
    itl_s: float = field(compare=False, default=0.0)
    num_streams: int = field(compare=False, default=1)


@dataclass
class Queue:
    """At most `max_waiting` requests, in the order in which they are let in."""

    max_waiting: int
    waiting: list[Waiter] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def is_full(self) -> bool:
        return len(self.waiting) >= self.max_waiting

    @property
    def first(self) -> Waiter | None:
        return self.waiting[0] if self.waiting else None

    def add(self, waiter: Waiter) -> None:
        insort(self.waiting, waiter)

    def remove(self, waiter: Waiter) -> None:
        """Take it out if it is there."""
        self.waiting = [one for one in self.waiting if one is not waiter]

    @property
    def total_s(self) -> float:
        """What the prompts of all take."""
        return sum(one.prefill_s for one in self.waiting)

    def ahead_s(self, waiter: Waiter) -> float:
        """What the prompts of those take that go before it."""
        return sum(one.prefill_s for one in self.waiting if one < waiter)

    def late_s(self, waiter: Waiter, now_s: float, wait_s: float, num_engines: int) -> float:
        """By how much its first token would miss its deadline; not positive if it can be in time.

        `wait_s` is until the first engine has done what it was given; `num_engines` share what waits.
        """
        return _late_s(waiter, now_s + wait_s, self.ahead_s(waiter) / max(1, num_engines))

    def take_late(self, now_s: float, wait_s: float, num_engines: int) -> list[tuple[Waiter, float]]:
        """Take out those that cannot be in time any more, and by how much. Each one that goes helps those behind it.

        One pass: this runs whenever an engine has done something.
        """
        late: list[tuple[Waiter, float]] = []
        kept: list[Waiter] = []
        ahead_s = 0.0
        for waiter in self.waiting:
            late_s = _late_s(waiter, now_s + wait_s, ahead_s / max(1, num_engines))
            if late_s > 0.0:
                late.append((waiter, late_s))
            else:
                kept.append(waiter)
                ahead_s += waiter.prefill_s
        self.waiting = kept
        return late


def _late_s(waiter: Waiter, free_at_s: float, ahead_s: float) -> float:
    """`free_at_s` is when the first engine has done what it was given, `ahead_s` what goes before this one takes."""
    if waiter.deadline_s == inf:
        return -inf
    return free_at_s + ahead_s + waiter.prefill_s - waiter.deadline_s
