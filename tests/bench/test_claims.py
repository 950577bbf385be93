"""The ratios that are claimed, from runs that are made up."""

from __future__ import annotations

import pytest

from fakes.bench_records import record, result_of
from fourhop.bench.claims import BARS, Calibration, Rates, claims_of, is_reached, plan_rates
from fourhop.bench.findings import Findings, Measured
from fourhop.bench.setups import Setup, other, replicas, split

SPLIT, AUTO = split("m", 1, 1, ()), other("auto=--x", "m", ())
DEFAULT, TUNED = replicas("m", 2, None, ()), replicas("m", 2, 256, ())
RATES = Rates(quiet=1.0, middle=(2.0, 4.0))


def run(setup: Setup, rate: float, ttft_s: float, itl_s: float) -> Measured:
    times = [ttft_s + place * itl_s for place in range(5)]
    return Measured(setup, rate, 0, result_of([record(0.0, *times)]))


def runs() -> list[Measured]:
    found = []
    for rate in (1.0, 2.0, 4.0):
        found.append(run(SPLIT, rate, 0.22, 0.01))
        found.append(run(DEFAULT, rate, 0.2, 0.02 * rate))
        found.append(run(TUNED, rate, 0.3, 0.01 * rate))
        found.append(run(AUTO, rate, 0.25, 0.01))
    return found


def test_the_split_is_held_against_the_best_replicas() -> None:
    claims = claims_of(Findings(runs()), RATES)
    assert claims["p99_itl_ratio"] == pytest.approx((4 + 8) / 2)
    assert claims["p99_itl_ratio_tuned"] == pytest.approx((2 + 4) / 2)
    assert claims["worst_itl_ratio"] == pytest.approx((4 + 8) / 2)
    assert claims["ttft_ratio"] == pytest.approx(1.1)
    assert claims["auto_ttft_ratio"] == pytest.approx(1.25)
    assert claims["auto_p99_itl_ratio"] == pytest.approx(8)
    assert claims["split_worst_itl_over_median"] == pytest.approx(1)
    # Limits are 2 s and 30 ms. The split and the router's choice keep them at every rate; the tuned replicas at two, at
    # which as many requests are good.
    assert claims["goodput_ratio"] == pytest.approx(1)
    assert claims["goodput_ratio_distserve"] == pytest.approx(2)
    assert claims["auto_goodput_ratio_distserve"] == pytest.approx(2)


def test_what_was_not_measured_is_none() -> None:
    claims = claims_of(Findings([one for one in runs() if one.setup is not AUTO]), RATES)
    assert (claims["auto_ttft_ratio"], claims["auto_p99_itl_ratio"]) == (None, None)
    assert set(claims_of(Findings([]), RATES).values()) == {None}


def test_limits_and_rates_follow_from_the_calibration() -> None:
    calibration = Calibration(ttft_s=2.0, tpot_s=0.05, capacity=0.41237)
    assert calibration.limits() == ("ttft:8000", "tpot:100.0")
    rates = plan_rates(calibration, [0.9])
    assert rates.quiet == 0.1
    assert rates.middle == (0.165, 0.206, 0.247)
    assert rates.all() == [0.1, 0.165, 0.206, 0.247, 0.371]


def test_a_bar_is_reached_or_not_or_not_measured() -> None:
    assert set(BARS) <= set(claims_of(Findings([]), RATES))
    assert (is_reached("ttft_ratio", 1.1), is_reached("ttft_ratio", 1.2)) == (True, False)
    assert (is_reached("p99_itl_ratio", 9.9), is_reached("p99_itl_ratio", 10.0)) == (False, True)
    assert (is_reached("p99_itl_ratio", None), is_reached("median_itl_ratio", 1.0)) == (None, None)
