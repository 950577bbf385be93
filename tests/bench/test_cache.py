"""Case 91: a run that met the prefix cache says so."""

from __future__ import annotations

import pytest

from fourhop.bench.cache import CacheCounts, cache_warning, parse_metrics

PAGE = """# HELP vllm:prefix_cache_queries_total Tokens looked up.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="a, \\"b\\" m"} 1000.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 500.0
vllm:prefix_cache_queries_created{engine="0"} 1.7e9
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 3e2
"""


def test_counters_are_summed_over_labels() -> None:
    assert parse_metrics(PAGE) == CacheCounts(1500, 300)
    assert parse_metrics("up 1\n") is None


def test_the_rate_is_that_of_the_run() -> None:
    run = CacheCounts(2500, 310).since(CacheCounts(1500, 300))
    assert run.rate == pytest.approx(0.01)
    assert CacheCounts(0, 0).rate is None


@pytest.mark.parametrize(
    ("rate", "is_wanted", "is_said"),
    [(None, False, False), (0.0, False, False), (0.01, False, False), (0.011, False, True), (0.9, True, False)],
)
def test_more_than_one_percent_is_warned_of_unless_it_is_wanted(
    rate: float | None, is_wanted: bool, is_said: bool
) -> None:
    assert (cache_warning(rate, is_wanted=is_wanted) is not None) is is_said
