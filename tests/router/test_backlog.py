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
    assert backlog.pauses.rate(1.5) == 0.0, "only what is sent arrives"


def test_company_is_who_is_here_for_how_long() -> None:
    backlog = Backlog()
    backlog.begin_stream("old", 0.0)
    backlog.begin_stream("new", 8.0)
    backlog.expect_stream("later", 14.0)
    assert backlog.num_beside(10.0, life_s=10.0) == pytest.approx(0.0 + 0.8 + 0.6)
    assert backlog.num_beside(10.0, life_s=0.0) == 0.0
    backlog.note_company(2.0)
    assert backlog.company(1.0) == pytest.approx(1.2)


def test_prompts_pause_streams_as_often_as_they_come_while_there_are_any() -> None:
    backlog = Backlog()
    assert backlog.pause_rate(0.0, 0.0) == 0.0
    assert backlog.pause_rate(0.0, 0.5) == pytest.approx(0.5), "what is usual elsewhere, until it is seen here"
    backlog.expect_prompt("nobody waits for it", 1.0, 5.0, stays=False)
    backlog.drop("nobody waits for it", 6.0)
    backlog.begin_stream("stream", 100.0)
    for number in range(40):
        backlog.expect_prompt(number, 1.0, 100.0 + number, stays=False)
        backlog.drop(number, 100.5 + number)
    backlog.drop("stream", 140.0)
    assert backlog.pause_rate(1000.0, 0.0) == pytest.approx(1.0, rel=0.05)
    assert backlog.pause_rate(1000.0, 0.1) == pytest.approx(12 / 30, rel=0.1)


def test_a_prompt_is_computed_for_no_longer_than_it_takes() -> None:
    backlog = Backlog()
    assert backlog.computed_s(1.0) == 0.0
    backlog.expect_prompt("a", 2.0, 10.0, stays=False)
    backlog.expect_prompt("b", 2.0, 10.0, stays=False)
    assert backlog.computed_s(11.0) == pytest.approx(1.0)
    assert backlog.computed_s(19.0) == pytest.approx(2.0)
