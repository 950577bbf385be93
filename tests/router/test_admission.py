"""Who is let in next."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourhop.router.admission import Queue, Waiter

waiters = st.lists(
    st.tuples(st.integers(-2, 2), st.one_of(st.just(inf), st.floats(0, 100)), st.floats(0, 10)), max_size=12
)


def queue_of(told: list[tuple[int, float, float]]) -> Queue:
    queue = Queue(100)
    for number, (priority, deadline_s, prefill_s) in enumerate(told):
        queue.add(Waiter(priority, deadline_s, number, prefill_s))
    return queue


def test_priority_then_deadline_then_arrival() -> None:
    queue = queue_of([(0, 9.0, 1.0), (0, 5.0, 1.0), (0, 5.0, 1.0), (-1, inf, 1.0), (1, 1.0, 1.0)])
    assert [waiter.number for waiter in queue.waiting] == [3, 1, 2, 0, 4]


def test_what_goes_before_is_waited_for() -> None:
    queue = queue_of([(0, 10.0, 3.0), (0, 20.0, 4.0)])
    last = Waiter(0, 30.0, 9, 2.0)
    assert queue.ahead_s(last) == 7.0
    assert queue.late_s(last, 15.0, 5.0, 1) == 15.0 + 5.0 + 7.0 + 2.0 - 30.0
    assert queue.late_s(last, 15.0, 5.0, 2) < 0.0
    assert queue.late_s(Waiter(0, inf, 10, 2.0), 15.0, 5.0, 1) == -inf


def test_one_that_cannot_be_in_time_does_not_make_others_late() -> None:
    queue = queue_of([(0, 4.0, 6.0), (0, 8.0, 3.0), (0, 9.0, 3.0)])
    assert [waiter.number for waiter, _ in queue.take_late(0.0, 0.0, 1)] == [0]
    assert [waiter.number for waiter in queue.waiting] == [1, 2]


def test_a_long_queue_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That happens whenever an engine has done something; comparing each with each would take 0.2 s."""
    queue = queue_of([(0, 1000.0 + number, 0.1) for number in range(1000)])
    num_compared = 0

    def counted(one: Waiter, other: Waiter) -> bool:
        nonlocal num_compared
        num_compared += 1
        return one.number < other.number

    monkeypatch.setattr(Waiter, "__lt__", counted)
    assert queue.take_late(0.0, 0.0, 1) == []
    assert num_compared <= 1000


@settings(max_examples=50)
@given(waiters, st.floats(0, 50), st.floats(0, 20), st.integers(1, 3))
def test_all_that_stay_can_be_in_time_and_all_that_go_could_not(
    told: list[tuple[int, float, float]], now_s: float, wait_s: float, num_engines: int
) -> None:
    queue = queue_of(told)
    late = queue.take_late(now_s, wait_s, num_engines)
    assert len(queue) + len(late) == len(told)
    assert all(late_s > 0.0 for _, late_s in late)
    assert all(queue.late_s(waiter, now_s, wait_s, num_engines) <= 0.0 for waiter in queue.waiting)
    assert queue.waiting == sorted(queue.waiting)


def test_it_has_an_end() -> None:
    queue = Queue(1)
    assert not queue.is_full and queue.first is None
    only = Waiter(0, 1.0, 0)
    queue.add(only)
    assert queue.is_full and queue.first is only
    queue.remove(only)
    queue.remove(only)
    assert len(queue) == 0
