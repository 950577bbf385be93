"""What an engine's work takes, learned."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourhop.router.costs import EngineCosts, Line

amounts = st.floats(0, 1e6)
observations = st.lists(st.tuples(amounts, st.floats(0, 1e4)), max_size=40)
anything = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=40)
@given(observations, observations, st.floats(0, 1), amounts, amounts)
def test_an_estimate_is_a_time_that_grows_with_the_amount(
    own: list[tuple[float, float]], others: list[tuple[float, float]], share: float, one: float, other: float
) -> None:
    parent = Line(share)
    line = Line(share, parent)
    for amount, seconds in others:
        parent.learn(amount, seconds)
    for amount, seconds in own:
        line.learn(amount, seconds)
    less, more = line.at(min(one, other)), line.at(max(one, other))
    assert 0.0 <= less <= more < math.inf


@settings(max_examples=40)
@given(st.lists(st.tuples(anything, anything), max_size=20))
def test_what_cannot_be_an_observation_is_not_taken(told: list[tuple[float, float]]) -> None:
    line = Line(0.0)
    line.learn(100, 2.0)
    for amount, seconds in told:
        line.learn(amount, seconds)
    assert 0.0 <= line.at(100) < math.inf


@pytest.mark.parametrize(("fixed", "each"), [(0.02, 0.002), (0.0, 0.005), (0.5, 0.0001)])
def test_it_finds_the_line_and_forgets_an_old_one(fixed: float, each: float) -> None:
    line = Line(0.0)
    for number in range(50):
        line.learn(100 + 37 * number % 900, 9.0)
    for number in range(80):
        amount = 100 + 37 * number % 900
        line.learn(amount, fixed + each * amount)
    for amount in (200, 500, 1000):
        assert line.at(amount) == pytest.approx(fixed + each * amount, rel=0.06)


def test_of_equal_amounts_nothing_is_learned_about_others_but_what_is_usual() -> None:
    prompts, steps = Line(0.0), Line(0.9)
    for _ in range(20):
        prompts.learn(700, 1.4)
        steps.learn(1, 0.022)
    assert prompts.at(1400) == pytest.approx(2.8, rel=0.05)
    assert steps.at(8) == pytest.approx(0.022 * (0.9 + 0.8), rel=0.1)


def test_an_engine_of_which_nothing_is_known_is_like_the_others() -> None:
    common = EngineCosts()
    seen, fresh = EngineCosts(common), EngineCosts(common)
    assert not fresh.is_known and fresh.prefill.at(100) == 0.0
    for number in range(10):
        seen.note_prefill(100 + number, 10.0 * number, 10.0 * number + 1.0)
    seen.settle()
    assert fresh.prefill.at(100) == pytest.approx(1.0, rel=0.05)


def test_prompts_that_were_computed_together_are_one_piece_of_work() -> None:
    costs = EngineCosts()
    costs.note_prefill(300, 0.0, 2.0)
    costs.note_prefill(700, 0.0, 2.0)
    costs.settle()
    assert costs.prefill.at(1000) == pytest.approx(2.0)
    assert costs.busy_s == 2.0


def test_prompts_one_after_the_other_are_not() -> None:
    costs = EngineCosts()
    costs.note_prefill(500, 0.0, 1.0)
    costs.note_prefill(500, 1.001, 2.001)
    costs.settle()
    assert costs.prefill.at(500) == pytest.approx(1.0, rel=0.01)
    assert costs.busy_s == pytest.approx(2.0)


def test_a_time_that_was_accounted_for_is_not_counted_twice() -> None:
    costs = EngineCosts()
    costs.note_prefill(500, 0.0, 1.0)
    costs.settle()
    costs.note_prefill(500, 0.2, 0.9)
    costs.note_prefill(500, 2.0, 1.0)
    costs.settle()
    assert costs.busy_s == 1.0
    assert costs.prefill.at(500) == pytest.approx(1.0, rel=0.01)


def test_trust_in_a_cache_follows_what_it_had() -> None:
    costs = EngineCosts()
    for _ in range(30):
        costs.note_cached(100, 0)
    assert costs.cache_trust < 0.01
    for _ in range(30):
        costs.note_cached(100, 100)
    assert costs.cache_trust > 0.99
    costs.note_cached(0, 50)
    assert costs.cache_trust <= 1.0


def test_an_idle_engine_is_remembered_through_a_busy_time() -> None:
    common = EngineCosts()
    costs = EngineCosts(common)
    for seconds in (0.05, 0.02, *[0.06] * 100):
        costs.note_pace(seconds)
    assert common.idle_step_s == pytest.approx(0.02, rel=0.02)
    assert common.idle_step_s > 0.02


def test_the_usual_length_follows_the_answers_and_the_first_ones_soon() -> None:
    costs = EngineCosts()
    for _ in range(20):
        costs.note_output(40)
    assert 40 < costs.num_output < 60
    for _ in range(100):
        costs.note_output(200)
    assert costs.num_output == pytest.approx(200, rel=0.01)
