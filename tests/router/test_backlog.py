"""What an engine was given and has not done."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourhop.router.backlog import Arrivals, Backlog


def test_prompts_wait_for_those_before_them() -> None:
    backlog = Backlog()
    assert backlog.wait_s(0.0) == 0.0
    backlog.expect_prompt("a", 2.0, 10.0, stays=False)
    backlog.expect_prompt("b", 3.0, 10.5, stays=True)
    assert backlog.wait_s(11.0) == pytest.approx(4.0)
    assert backlog.wait_s(99.0) == pytest.approx(3.0)  # the first is late, the second takes its time all the same
    backlog.drop("a", 12.5)
    assert backlog.wait_s(13.5) == pytest.approx(2.0)
    assert (backlog.num_streams(), backlog.num_paused_by(20.0)) == (1, (1, 1))
    backlog.begin_stream("b", 15.5)
    assert backlog.wait_s(15.5) == 0.0
    assert backlog.num_streams() == 1


def test_a_stream_that_arrives_later_is_not_kept_waiting() -> None:
    backlog = Backlog()
    backlog.expect_stream("soon", 11.0)
    backlog.expect_stream("late", 15.0)
    assert backlog.num_streams() == 2
    assert backlog.num_paused_by(12.0) == (1, 1)
    backlog.mark_late("soon")
    assert backlog.num_paused_by(12.0) == (1, 0)
    assert backlog.num_paused_by(16.0) == (2, 1)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from(["prompt", "staying", "stream", "begin", "drop"]), st.integers(0, 4)), max_size=40
    )
)
def test_nothing_is_left_when_all_is_dropped(events: list[tuple[str, int]]) -> None:
    backlog = Backlog()
    for now_s, (event, key) in enumerate(events):
        if event in ("prompt", "staying"):
            backlog.drop(key, now_s)
            backlog.expect_prompt(key, 1.5, now_s, stays=event == "staying")
        elif event == "stream":
            backlog.expect_stream(key, now_s + 1.0)
        elif event == "begin":
            backlog.begin_stream(key, now_s)
        else:
            backlog.drop(key, now_s)
        assert backlog.wait_s(now_s) >= 0.0
    for key in range(5):
        backlog.drop(key, 100.0)
    assert backlog.wait_s(100.0) == 0.0
    assert (backlog.num_streams(), backlog.num_paused_by(200.0)) == (0, (0, 0))


def test_a_rate_falls_when_nothing_comes() -> None:
    arrivals = Arrivals()
    assert arrivals.rate(0.0) == 0.0
    for number in range(20):
        arrivals.note(1.0, number * 0.5)
    assert arrivals.rate(9.5) == pytest.approx(2.0)
    assert arrivals.rate(1009.5) < 0.02


def test_an_announced_prompt_has_its_place_and_its_going_changes_no_other() -> None:
    backlog = Backlog()
    backlog.expect_prompt("first", 2.0, 0.0, stays=False)
    backlog.announce_prompt("second", 3.0, 1.0)
    assert backlog.wait_s(1.5) == 2.0 - 1.5 + 3.0
    backlog.withdraw_prompt("second")
    backlog.withdraw_prompt("second")
    assert backlog.wait_s(1.5) == 0.5
    assert backlog.arrivals.rate(1.5) == 0.0, "only what is sent arrives"
