"""What alternating runs say: medians over the rounds, goodput, and how set-ups stand to each other. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fourhop.bench.result import Result
from fourhop.bench.search import Tried, distserve_goodput, vllm_goodput
from fourhop.bench.setups import Setup
from fourhop.bench.sweep import milliseconds

Value = Callable[[Result], float | None]

VALUES: Mapping[str, Value] = {
    "inside": lambda result: _percent(result.summary.good_share),
    "goodput": lambda result: result.summary.goodput,
    "ttft_p50": lambda result: milliseconds(result, "ttft", 50),
    "ttft_p99": lambda result: milliseconds(result, "ttft", 99),
    "tpot_p50": lambda result: milliseconds(result, "tpot", 50),
    "tpot_p99": lambda result: milliseconds(result, "tpot", 99),
    "itl_p50": lambda result: milliseconds(result, "itl", 50),
    "itl_p99": lambda result: milliseconds(result, "itl", 99),
    "itl_worst": lambda result: _ms(result.summary.metrics["itl"].worst),
    "failed": lambda result: float(result.summary.failed),
    "cached": lambda result: _percent(result.cache_hit_rate),
}
"""Columns of a comparison: shares in percent, times in ms, goodput in requests per second."""


@dataclass(frozen=True)
class Measured:
    """One run of a comparison."""

    setup: Setup
    rate: float
    round: int
    result: Result


@dataclass(frozen=True)
class Cell:
    """A value over the rounds: its median, its least and its greatest. None where no round had one."""

    median: float | None
    least: float | None = None
    greatest: float | None = None


class Findings:
    """All runs of a comparison, by set-up and rate."""

    def __init__(self, runs: Sequence[Measured]) -> None:
        self.runs = list(runs)
        self.setups = list({run.setup.name: run.setup for run in runs}.values())
        self.rates = sorted({run.rate for run in runs})

    def cell(self, setup: Setup, rate: float, value: str) -> Cell:
        """A value of `VALUES`, over the rounds."""
        at = (run.result for run in self.runs if run.setup.name == setup.name and run.rate == rate)
        return cell_of(VALUES[value](result) for result in at)

    def curve(self, setup: Setup, value: str) -> list[tuple[float, float]]:
        """The medians over the rates that have one."""
        cells = [(rate, self.cell(setup, rate, value).median) for rate in self.rates]
        return [(rate, median) for rate, median in cells if median is not None]

    def tried(self, setup: Setup) -> list[Tried]:
        """The rates with their medians."""
        found = []
        for rate in self.rates:
            inside = self.cell(setup, rate, "inside").median
            share = None if inside is None else inside / 100
            found.append(Tried(rate, share, self.cell(setup, rate, "goodput").median))
        return found

    def goodputs(self, setup: Setup, attainment: float) -> tuple[float | None, float | None]:
        """DistServe's and vLLM's goodput."""
        tried = self.tried(setup)
        return distserve_goodput(tried, attainment), vllm_goodput(tried)

    def warnings(self) -> list[str]:
        """What the runs warn of, each once."""
        return list(dict.fromkeys(text for run in self.runs for text in run.result.warnings))


def cell_of(values: Iterable[float | None]) -> Cell:
    found = [value for value in values if value is not None]
    return Cell(statistics.median(found), min(found), max(found)) if found else Cell(None)


def ratio(above: float | None, below: float | None) -> float | None:
    """None where there is no such number, or nothing to divide by."""
    return None if above is None or not below else above / below


def best(values: Iterable[float | None], choose: Callable[[Iterable[float]], float]) -> float | None:
    """`min` or `max` of those that are there."""
    found = [value for value in values if value is not None]
    return choose(found) if found else None


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
