"""A comparison as tables and as JSON. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fourhop.bench.comparison import CompareConfig
from fourhop.bench.config import MetricsConfig, ResultConfig
from fourhop.bench.findings import VALUES, Cell, Findings
from fourhop.bench.result import as_json
from fourhop.bench.search import ATTAINMENT
from fourhop.bench.table import number, table

COLUMNS: Mapping[str, tuple[str, int]] = {
    "failed": ("failed", 0),
    "inside": ("inside %", 0),
    "goodput": ("goodput", 3),
    "ttft_p50": ("TTFT p50", 0),
    "ttft_p99": ("TTFT p99", 0),
    "tpot_p50": ("TPOT p50", 0),
    "itl_p50": ("ITL p50", 0),
    "itl_p99": ("ITL p99", 0),
    "itl_worst": ("ITL worst", 0),
    "cached": ("cache %", 1),
}
"""Titles and digits of the columns, by the name of their value."""


@dataclass(frozen=True)
class Report:
    """All that is told of a comparison."""

    config: CompareConfig
    model: str
    findings: Findings
    machine: Mapping[str, str]

    def limits(self) -> dict[str, float]:
        """In seconds, by metric."""
        return MetricsConfig(goodput=self.config.resolve().limits).limits()

    def words(self) -> list[str]:
        """What was run, a sentence each."""
        preset, config = self.config.resolve(), self.config
        low, high = (round(preset.num_input * (1 + sign * preset.input_ratio)) for sign in (-1, 1))
        prompt = f"{low}" if low == high else f"{low} to {high}"
        length = f"{preset.num_prompts} requests" if config.seconds is None else f"{config.seconds:g} s"
        limits = ", ".join(f"{name} {limit * 1000:g} ms" for name, limit in self.limits().items())
        return [
            f"Prompts of {prompt} random tokens, answers of {preset.num_output}, greedy; arrivals are Poisson.",
            f"{length} at every rate, {config.rounds} rounds in alternating order; values are medians over the rounds.",
            f"Limits: {limits}. The prefix cache is off. Every set-up gets the same prompts at the same times.",
        ]


def comparison_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Head and rows: every set-up at every rate, times in ms."""
    findings = report.findings
    head = ["set-up", "req/s", *(title for title, _ in COLUMNS.values())]
    rows = []
    for rate in findings.rates:
        for setup in findings.setups:
            cells = [number(findings.cell(setup, rate, name).median, digits) for name, (_, digits) in COLUMNS.items()]
            rows.append([setup.name, f"{rate:g}", *cells])
    return head, rows


def goodput_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Head and rows: each set-up's goodput, by both definitions."""
    head = ["set-up", f"goodput (DistServe, {ATTAINMENT:.0%})", "goodput (vLLM)"]
    findings = report.findings
    rows = [
        [setup.name, *(number(value, 3) for value in findings.goodputs(setup, ATTAINMENT))] for setup in findings.setups
    ]
    return head, rows


def comparison_table(report: Report) -> str:
    return table(*comparison_rows(report))


def goodput_table(report: Report) -> str:
    return table(*goodput_rows(report))


def comparison_json(report: Report) -> dict[str, Any]:
    """Everything, the result of each run with vLLM's keys among it."""
    findings, metrics = report.findings, MetricsConfig(goodput=report.config.resolve().limits)
    return {
        "model": report.model,
        "machine": report.machine,
        "config": dataclasses.asdict(report.config) | {"output_dir": str(report.config.output_dir)},
        "limits_ms": {name: limit * 1000 for name, limit in report.limits().items()},
        "setups": [
            {
                "name": setup.name,
                "commands": [str(command) for command in setup.commands],
                "goodput_distserve": findings.goodputs(setup, ATTAINMENT)[0],
                "goodput_vllm": findings.goodputs(setup, ATTAINMENT)[1],
                "rates": {f"{rate:g}": _values(findings, setup, rate) for rate in findings.rates},
            }
            for setup in findings.setups
        ],
        "runs": [
            {"setup": run.setup.name, "rate": run.rate, "round": run.round}
            | as_json(run.result, metrics, ResultConfig())
            for run in findings.runs
        ],
    }


def _values(findings: Findings, setup: Any, rate: float) -> dict[str, list[float | None]]:
    """Median, least and greatest of each value."""

    def three(cell: Cell) -> list[float | None]:
        return [cell.median, cell.least, cell.greatest]

    return {name: three(findings.cell(setup, rate, name)) for name in VALUES}
