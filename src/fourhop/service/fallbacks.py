"""Telling of what is done in place of what was asked for: counted each time, logged seldom."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from prometheus_client import Counter

from fourhop.service.logs import event

EVERY_S = 60.0
"""The least time between two lines of one cause."""


class Seldom:
    """Warnings of which there may be thousands a second: of each cause the first at once, then at most one a minute,
    which tells how many there were since. For one thread.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._told_s: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def tell(self, cause: str, what: str) -> None:
        now_s, count = self._clock(), self._counts.get(cause, 0) + 1
        self._counts[cause] = count
        if now_s - self._told_s.get(cause, float("-inf")) >= EVERY_S:
            self._told_s[cause], self._counts[cause] = now_s, 0
            self._log.warning(event("fallback", cause=cause, times=count, last=what))


class Fallbacks:
    """The fallbacks of one server. `counter` has the label `cause`."""

    def __init__(self, counter: Counter, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._counter = counter
        self._seldom = Seldom(log, clock)

    def note(self, cause: str, what: str) -> None:
        self._counter.labels(cause).inc()
        self._seldom.tell(cause, what)
