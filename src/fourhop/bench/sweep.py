"""`fourhop bench sweep`: the rate at which a server fails its targets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourhop.bench.config import MetricsConfig, ResultConfig
from fourhop.bench.result import Result, as_json
from fourhop.bench.runs import Plan, open_bench
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
from fourhop.bench.serve import INTERRUPTED, write
from fourhop.bench.table import number, table
from fourhop.flags import UsageError

Measure = Callable[[Plan], Awaitable[Result]]
"""One measured run: `Bench.run`."""


@dataclass(frozen=True)
class Point:
    """One rate of a sweep, measured."""

    rate: float
    result: Result

    @property
    def tried(self) -> Tried:
        return Tried(self.rate, self.result.summary.good_share, self.result.summary.goodput)


async def run_sweep(plan: Plan, sweep: SweepConfig, config: ResultConfig) -> int:
    """Step the rate, print every point as it comes, then the goodput. Returns the exit status. Raises StartError."""
    check_sweep(plan)
    points: list[Point] = []
    plan = dataclasses.replace(plan, keeps_text=config.save_detailed, shows_progress=not config.disable_tqdm)
    async with open_bench(plan.target) as bench:
        async for point in sweep_points(bench.run, plan, sweep):
            points.append(point)
            print(point_line(point), flush=True)
    print(sweep_table(points))
    print(verdict(points, plan.metrics, sweep.attainment))
    if config.save_result or config.save_detailed:
        print(f"saved: {write(_path(points, config), sweep_json(points, plan, sweep, config), appends=False)}")
    if any(point.result.is_cut for point in points):
        return INTERRUPTED
    return 0 if any(point.result.is_success for point in points) else 1


def whole(points: Sequence[Point]) -> list[Tried]:
    """What counts for a verdict: a point that Ctrl-C cut short says nothing of its rate."""
    return [point.tried for point in points if not point.result.is_cut]


def check_sweep(plan: Plan) -> None:
    """Raises UsageError for a plan that cannot be swept."""
    if plan.load.request_rate < math.inf or plan.load.ramp_up_strategy is not None:
        raise UsageError("a sweep steps the rate itself: leave --request-rate and ramps out")
    if not plan.metrics.limits():
        raise UsageError("a sweep needs limits: --goodput ttft:2000 tpot:30")


async def sweep_points(measure: Measure, plan: Plan, sweep: SweepConfig) -> AsyncIterator[Point]:
    """The points, each with a seed of its own; ends early after Ctrl-C."""
    points: list[Point] = []
    while (rate := next_rate([point.tried for point in points], sweep)) is not None:
        result = await measure(plan_point(plan, sweep, rate, len(points)))
        points.append(Point(rate, result))
        yield points[-1]
        if result.is_cut:
            return


def plan_point(plan: Plan, sweep: SweepConfig, rate: float, place: int) -> Plan:
    load = dataclasses.replace(
        plan.load,
        request_rate=rate,
        num_prompts=num_prompts_of(rate, sweep.seconds, plan.load.num_prompts),
        seed=seed_of(plan.load.seed, place),
    )
    return dataclasses.replace(plan, load=load, title=f"{rate:.3g} req/s")


def point_line(point: Point) -> str:
    """A point as it is told when it is there."""
    summary = point.result.summary
    share = None if summary.good_share is None else summary.good_share * 100
    told = f"{point.rate:.3g} req/s: {number(share)} % inside the limits, {summary.failed} failed"
    return "\n".join([told, *(f"  warning: {text}" for text in point.result.warnings)])


def sweep_table(points: Sequence[Point]) -> str:
    """A row for each rate, in their order."""
    head = ["req/s", "requests", "failed", "inside %", "goodput", "TTFT p50", "TTFT p99", "TPOT p50", "ITL p50"]
    head += ["ITL p99", "cache %"]
    rows = []
    for point in sorted(points, key=lambda one: one.rate):
        summary, rate = point.result.summary, point.result.cache_hit_rate
        share = None if summary.good_share is None else summary.good_share * 100
        row = [number(point.rate, 3), str(summary.completed), str(summary.failed), number(share, 0)]
        row += [number(summary.goodput, 3)]
        for name, percent in (("ttft", 50), ("ttft", 99), ("tpot", 50), ("itl", 50), ("itl", 99)):
            row.append(number(milliseconds(point.result, name, percent), 0))
        rows.append([*row, number(None if rate is None else rate * 100, 1)])
    return table(head, rows)


def milliseconds(result: Result, name: str, percent: float) -> float | None:
    """A percentile of a metric of a result, None if it has none."""
    values = result.summary.metrics.get(name)
    seconds = None if values is None else values.percentiles.get(percent)
    return None if seconds is None else seconds * 1000


def verdict(points: Sequence[Point], metrics: MetricsConfig, attainment: float) -> str:
    """The goodput by each definition, in words."""
    tried = whole(points)
    limits = ", ".join(f"{name} {limit * 1000:g} ms" for name, limit in metrics.limits().items())
    ours, theirs, fails = distserve_goodput(tried, attainment), vllm_goodput(tried), failing_rate(tried, attainment)
    return "\n".join(
        [
            f"limits: {limits}",
            f"goodput, best rate with {attainment:.0%} of requests inside limits (DistServe): {number(ours, 3)} req/s",
            f"goodput, most requests inside the limits per second (vLLM): {number(theirs, 3)} req/s",
            f"least rate that fails: {number(fails, 3)} req/s",
        ]
    )


def sweep_json(points: Sequence[Point], plan: Plan, sweep: SweepConfig, config: ResultConfig) -> dict[str, Any]:
    tried = whole(points)
    return {
        "goodput_distserve": distserve_goodput(tried, sweep.attainment),
        "goodput_vllm": vllm_goodput(tried),
        "failing_rate": failing_rate(tried, sweep.attainment),
        "attainment": sweep.attainment,
        "points": [as_json(point.result, plan.metrics, config) for point in points],
    }


def _path(points: Sequence[Point], config: ResultConfig) -> Path:
    date = points[0].result.date
    return (config.result_dir or Path()) / (config.result_filename or f"sweep-{date:%Y%m%d-%H%M%S}.json")
