"""Schedules: the pattern is drawn, the load is not."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourhop.bench.arrivals import schedule
from fourhop.bench.config import LoadConfig

RATES = st.floats(0.01, 1000)
SHAPES = st.one_of(st.floats(0.2, 50), st.just(math.inf))


@given(st.integers(1, 200), RATES, SHAPES, st.integers(0, 10))
def test_times_ascend_and_the_last_is_number_over_rate(num: int, rate: float, burstiness: float, seed: int) -> None:
    due = schedule(LoadConfig(request_rate=rate, burstiness=burstiness, seed=seed), num)
    assert len(due) == num
    assert due == sorted(due)
    assert due[0] >= 0
    assert due[-1] == pytest.approx(num / rate)


@given(st.integers(2, 100), RATES, st.integers(0, 10))
def test_a_seed_decides_the_pattern_and_a_rate_only_stretches_it(num: int, rate: float, seed: int) -> None:
    due = schedule(LoadConfig(request_rate=rate, seed=seed), num)
    assert due == schedule(LoadConfig(request_rate=rate, seed=seed), num)
    assert [at_s * 2 for at_s in schedule(LoadConfig(request_rate=2 * rate, seed=seed), num)] == pytest.approx(due)
    assert due != schedule(LoadConfig(request_rate=rate, seed=seed + 1), num)


def test_intervals_of_a_poisson_process_are_exponential() -> None:
    due = schedule(LoadConfig(request_rate=2.0, seed=3), 20_000)
    gaps = [later - earlier for earlier, later in pairwise(due)]
    assert statistics.mean(gaps) == pytest.approx(0.5, rel=0.01)
    assert statistics.stdev(gaps) == pytest.approx(0.5, rel=0.03)
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)


@pytest.mark.parametrize("burstiness", [0.25, 1, 16])
def test_burstiness_is_one_over_the_squared_variation(burstiness: float) -> None:
    due = schedule(LoadConfig(request_rate=1.0, burstiness=burstiness, seed=1), 20_000)
    gaps = [later - earlier for earlier, later in pairwise(due)]
    assert (statistics.mean(gaps) / statistics.stdev(gaps)) ** 2 == pytest.approx(burstiness, rel=0.1)


def test_infinite_burstiness_is_even_and_infinite_rate_is_at_once() -> None:
    assert schedule(LoadConfig(request_rate=4.0, burstiness=math.inf), 4) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert schedule(LoadConfig(), 3) == [0.0, 0.0, 0.0]
    assert schedule(LoadConfig(request_rate=1.0), 0) == []


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 5.5), ("exponential", math.sqrt(10))])
def test_a_ramp_goes_from_one_rate_to_the_other(strategy: str, middle: float) -> None:
    load = LoadConfig(
        ramp_up_strategy=strategy,  # type: ignore[arg-type]
        ramp_up_start_rps=1.0,
        ramp_up_end_rps=10.0,
        burstiness=math.inf,
    )
    due = [0.0, *schedule(load, 101)]
    rates = [1 / (later - earlier) for earlier, later in pairwise(due)]
    assert (rates[0], rates[50], rates[100]) == pytest.approx((1.0, middle, 10.0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"request_rate": 0.0},
        {"burstiness": -1.0},
        {"max_concurrency": 0},
        {"num_prompts": -1},
        {"ramp_up_strategy": "linear"},
        {"ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0},
        {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0, "request_rate": 3.0},
    ],
)
def test_a_load_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must|needs|ramp"):
        LoadConfig(**wrong)  # type: ignore[arg-type]
