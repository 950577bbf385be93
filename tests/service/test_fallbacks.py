from __future__ import annotations

import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter

from fakes.fleet import Clock
from fourhop.service.fallbacks import EVERY_S, Fallbacks, Seldom

LOG = logging.getLogger("fallback test")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def test_the_first_is_told_at_once_and_then_one_a_minute_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    seldom = Seldom(LOG, clock)
    seldom.tell("a", "one")
    seldom.tell("b", "other")
    for number in range(59):
        clock.now_s += 1.0
        seldom.tell("a", f"more {number}")
    clock.now_s += 1.0
    seldom.tell("a", "last")
    assert lines(caplog) == [
        "fallback cause=a times=1 last=one",
        "fallback cause=b times=1 last=other",
        "fallback cause=a times=60 last=last",
    ]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.0, 40.0)), max_size=40))
def test_every_one_is_counted_and_no_cause_is_told_twice_a_minute(events: list[tuple[str, float]]) -> None:
    told: list[tuple[str, float]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append((record.getMessage().split()[1], clock.now_s))

    clock, registry, log = Clock(), CollectorRegistry(), logging.Logger("one")
    log.addHandler(Handler())
    fallbacks = Fallbacks(Counter("f", "f", ["cause"], registry=registry), log, clock)
    for cause, pause_s in events:
        clock.now_s += pause_s
        fallbacks.note(cause, "it")
    for cause in "ab":
        expected = sum(one == cause for one, _ in events)
        assert (registry.get_sample_value("f_total", {"cause": cause}) or 0) == expected
        times = [at_s for name, at_s in told if name == f"cause={cause}"]
        assert all(after - before >= EVERY_S for before, after in pairwise(times))
        assert bool(times) == bool(expected)
