"""Numbers out of records, against numpy and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.bench_records import record
from fourhop.bench.measure import distribution, peak_open, peak_rate, percentile, summarize

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


@settings(deadline=None)  # numpy imports parts of itself when they are first used
@given(VALUES, st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)))


@settings(deadline=None)  # numpy imports parts of itself when they are first used
@given(VALUES)
def test_mean_median_and_spread_are_those_of_numpy(values: list[float]) -> None:
    found = distribution(values, (99,))
    assert (found.num, found.worst) == (len(values), max(values))
    expected = (float(np.mean(values)), float(np.median(values)), float(np.std(values)))
    assert (found.mean, found.median, found.std) == pytest.approx(expected, abs=1e-6)


def test_itls_of_a_request_sum_to_its_time_after_the_first_chunk() -> None:
    one = record(0.0, 0.1, 0.14, 0.18, num=[1, 4, 4])
    assert sum(one.itls_s() or []) == pytest.approx(0.08)
    assert len(one.itls_s() or []) == 8


def test_all_limits_must_be_met() -> None:
    one = record(0.0, 1.0, 1.1, 1.2)
    assert one.meets({"ttft": 1.0, "tpot": 0.11, "e2el": 1.2})
    assert not one.meets({"ttft": 0.99, "tpot": 0.11})
    assert not one.meets({"ttft": 1.0, "tpot": 0.09})
    assert one.meets({})


def test_the_peak_rate_counts_tokens_not_chunks() -> None:
    assert peak_rate([record(0.0, 5.5, 6.4, 6.6, num=[1, 4, 4])]) == 5
    assert peak_rate([]) is None


def test_the_most_open_requests_are_counted() -> None:
    assert peak_open([record(0.0, 2.0), record(1.0, 3.0), record(2.0, 4.0)]) == 2
    assert peak_open([]) == 0


def test_lag_is_how_late_the_client_was() -> None:
    summary = summarize([record(3.0, 4.0, due_s=2.5)], 10.0, limits={}, metrics=(), percentiles=())
    assert summary.lag.worst == pytest.approx(0.5)
    assert (summary.goodput, summary.good_share) == (None, None)


def test_no_number_is_infinite_or_nan() -> None:
    summary = summarize([record(0.0, 0.0)], 0.0, limits={"ttft": 1.0}, metrics=("ttft", "tpot"), percentiles=(99,))
    numbers = [summary.request_rate, summary.output_rate, summary.goodput, summary.metrics["ttft"].mean]
    assert all(number is None or math.isfinite(number) for number in numbers)
