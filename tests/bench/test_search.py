"""Which rates are tried, and what goodput follows from them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourhop.bench.search import (
    SweepConfig,
    Tried,
    distserve_goodput,
    failing_rate,
    next_rate,
    num_prompts_of,
    seed_of,
    vllm_goodput,
)


def sweep(capacity: float, config: SweepConfig) -> list[Tried]:
    """All points against a server that keeps its promises up to this rate, and to nobody beyond it."""
    tried: list[Tried] = []
    while (rate := next_rate(tried, config)) is not None:
        share = 1.0 if rate <= capacity else 0.5
        tried.append(Tried(rate, share, rate * share))
        assert len(tried) < 100
    return tried


def test_the_rate_grows_until_it_fails_and_is_then_refined() -> None:
    rates = [one.rate for one in sweep(3.0, SweepConfig(start_rate=1.0, rate_factor=2.0, num_refinements=2))]
    assert rates == pytest.approx([1, 2, 4, 2**1.5, 2**1.75])


def test_a_first_rate_that_fails_is_followed_by_smaller_ones() -> None:
    rates = [one.rate for one in sweep(0.3, SweepConfig(start_rate=1.0, rate_factor=2.0, num_refinements=1))]
    assert rates == pytest.approx([1, 0.5, 0.25, 0.25 * 2**0.5])


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.floats(1.1, 4), st.integers(0, 4))
def test_the_answer_is_within_a_step_of_the_truth(
    capacity: float, start: float, factor: float, num_refinements: int
) -> None:
    config = SweepConfig(start_rate=start, rate_factor=factor, num_refinements=num_refinements, max_points=200)
    tried = sweep(capacity, config) if 0.02 < capacity / start < 50 else sweep(start, config)
    truth = capacity if 0.02 < capacity / start < 50 else start
    found, fails = distserve_goodput(tried), failing_rate(tried)
    assert found is not None and fails is not None
    assert found <= truth < fails
    assert fails / found <= factor ** (0.5**num_refinements) * 1.0001
    assert len({one.rate for one in tried}) == len(tried)


def test_a_list_of_rates_is_tried_as_it_is() -> None:
    config = SweepConfig(request_rates="0.5, 2,1")
    assert [one.rate for one in sweep(1.0, config)] == [0.5, 2.0, 1.0]


def test_there_is_an_end_even_where_nothing_fails() -> None:
    assert len(sweep(float("inf"), SweepConfig(max_points=7))) == 7
    assert len(sweep(0.0, SweepConfig(max_points=7))) == 7


def test_the_definitions_of_goodput_differ() -> None:
    tried = [Tried(1.0, 1.0, 0.99), Tried(2.0, 0.9, 1.8), Tried(4.0, 0.6, 2.4), Tried(8.0, None, None)]
    assert distserve_goodput(tried) == 2.0
    assert vllm_goodput(tried) == 2.4
    assert failing_rate(tried) == 4.0
    assert (distserve_goodput([]), vllm_goodput([]), failing_rate([])) == (None, None, None)


def test_a_seed_follows_from_the_point_alone() -> None:
    """Case 91."""
    assert seed_of(0, 1) == seed_of(0, 1)
    assert len({seed_of(seed, place) for seed in range(5) for place in range(20)}) == 100


def test_a_point_is_as_long_as_is_asked_for() -> None:
    assert num_prompts_of(0.4, 60, 100) == 24
    assert num_prompts_of(0.001, 60, 100) == 1
    assert num_prompts_of(0.4, None, 100) == 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"start_rate": 0.0},
        {"rate_factor": 1.0},
        {"max_points": 0},
        {"attainment": 1.1},
        {"seconds": 0.0},
        {"request_rates": "1,x"},
        {"request_rates": "1,-2"},
    ],
)
def test_a_sweep_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|are positive"):
        SweepConfig(**wrong)
