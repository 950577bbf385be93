"""A sweep of a server that is only played: its points, its seeds, its words."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from fakes.bench_records import METRICS, good, result_of
from fourhop.bench.config import LoadConfig, MetricsConfig, ResultConfig, TargetConfig
from fourhop.bench.result import Result
from fourhop.bench.runs import Plan
from fourhop.bench.search import SweepConfig
from fourhop.bench.sweep import Point, check_sweep, sweep_json, sweep_points, sweep_table, verdict
from fourhop.flags import UsageError

PLAN = Plan(target=TargetConfig(), load=LoadConfig(seed=5), metrics=METRICS)
SWEEP = SweepConfig(request_rates="1,2,4", seconds=10)


class Played:
    """Passes below three requests a second. Remembers the plans; is cut by Ctrl-C at `cut_at` requests a second."""

    def __init__(self, cut_at: float = 99.0) -> None:
        self.plans: list[Plan] = []
        self.cut_at = cut_at

    async def __call__(self, plan: Plan) -> Result:
        self.plans.append(plan)
        rate = plan.load.request_rate
        slow = dataclasses.replace(good(), sent_s=-9.0)
        result = result_of([good() if rate < 3 else slow], is_cut=rate >= self.cut_at)
        return dataclasses.replace(result, load=plan.load)


def points_of(played: Played) -> list[Point]:
    async def work() -> list[Point]:
        return [point async for point in sweep_points(played, PLAN, SWEEP)]

    return asyncio.run(work())


def test_every_point_has_its_rate_its_length_and_a_seed_of_its_own() -> None:
    played = Played()
    points_of(played)
    loads = [plan.load for plan in played.plans]
    assert [(load.request_rate, load.num_prompts) for load in loads] == [(1, 10), (2, 20), (4, 40)]
    assert len({load.seed for load in loads}) == 3


def test_ctrl_c_ends_the_sweep_with_the_points_that_are_there() -> None:
    assert [point.rate for point in points_of(Played(cut_at=2))] == [1, 2]


def test_a_point_that_was_cut_says_nothing_of_its_rate() -> None:
    points = points_of(Played(cut_at=2))
    text = verdict(points, METRICS, 0.9)
    assert "(DistServe): 1.000 req/s" in text
    assert sweep_json(points, PLAN, SWEEP, ResultConfig())["goodput_distserve"] == 1.0


def test_the_table_and_the_verdict_are_in_words() -> None:
    points = points_of(Played())
    lines = sweep_table(points).splitlines()
    assert lines[0].split()[:4] == ["req/s", "requests", "failed", "inside"]
    assert [line.split()[3] for line in lines[2:]] == ["100", "100", "0"]
    text = verdict(points, METRICS, 0.9)
    assert "limits: ttft 2000 ms, tpot 30 ms" in text
    assert "(DistServe): 2.000 req/s" in text
    assert "least rate that fails: 4.000 req/s" in text


def test_the_result_is_json_with_a_result_for_each_point() -> None:
    values = sweep_json(points_of(Played()), PLAN, SWEEP, ResultConfig())
    again = json.loads(json.dumps(values, allow_nan=False))
    assert (again["goodput_distserve"], again["failing_rate"]) == (2.0, 4.0)
    assert [point["request_rate"] for point in again["points"]] == [1, 2, 4]


def test_a_sweep_needs_limits_and_sets_the_rate_itself() -> None:
    with pytest.raises(UsageError, match="needs limits"):
        check_sweep(dataclasses.replace(PLAN, metrics=MetricsConfig()))
    with pytest.raises(UsageError, match="steps the rate itself"):
        check_sweep(dataclasses.replace(PLAN, load=LoadConfig(request_rate=1.0)))
