"""The command lines of `fourhop bench`."""

from __future__ import annotations

import resource
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import uvloop
from cyclopts import App, Parameter

from fourhop.bench.compare import run_compare
from fourhop.bench.comparison import CompareConfig
from fourhop.bench.config import LoadConfig, MetricsConfig, ResultConfig, SamplingConfig, TargetConfig
from fourhop.bench.dataset_config import DatasetConfig
from fourhop.bench.runs import Plan
from fourhop.bench.search import SweepConfig
from fourhop.bench.serve import run_serve
from fourhop.bench.sweep import run_sweep
from fourhop.flags import with_flags

bench = App(name="bench", help="Load a server, and see at which rate it keeps its promises.", help_format="markdown")


def command(function: Callable[..., int]) -> None:
    """Make this function a command, its configs flags. It returns the exit status."""
    bench.command(with_flags(function))


@command
def serve(
    *,
    target: TargetConfig,
    load: LoadConfig,
    dataset: DatasetConfig,
    sampling: SamplingConfig,
    metrics: MetricsConfig,
    result: ResultConfig,
) -> int:
    """Send requests to a server and print what came of them, as `vllm bench serve` does.

    Ctrl-C ends the run and prints what there is. The exit status is 1 if no request succeeded.

    Example: `fourhop bench serve --random-input-len 512 --request-rate 0.4 --num-prompts 50 --goodput tpot:30`
    """
    plan = Plan(target=target, load=load, dataset=dataset, sampling=sampling, metrics=metrics)
    return run(run_serve(plan, result))


@command
def sweep(
    *,
    sweep: SweepConfig,
    target: TargetConfig,
    load: LoadConfig,
    dataset: DatasetConfig,
    sampling: SamplingConfig,
    metrics: MetricsConfig,
    result: ResultConfig,
) -> int:
    """Step the request rate until the server fails its limits, and print its goodput.

    Each rate has a seed of its own and is told with its prefix cache hits.

    Example: `fourhop bench sweep --random-input-len 512 --seconds 60 --num-warmups 4 --goodput ttft:2000 tpot:90`
    """
    plan = Plan(target=target, load=load, dataset=dataset, sampling=sampling, metrics=metrics)
    return run(run_sweep(plan, sweep, result))


@command
def compare(
    model: Annotated[str | None, Parameter(help="A model. Default: the preset's.")] = None, /, *, compare: CompareConfig
) -> int:
    """Measure split serving against replicas on the same cores, in alternating runs, and write a report of it.

    The set-ups are `fourhop up` with different flags, started and ended here; each is told with its command.

    Example: `fourhop bench compare --preset guide-small --request-rates 0.1,0.2 --rounds 1`
    """
    return run(run_compare(model, compare))


def run(work: Coroutine[Any, Any, int]) -> int:
    """Run to the end on the loop that disturbs time stamps least, with as many open connections as are allowed."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return uvloop.run(work)
