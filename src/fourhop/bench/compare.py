"""`fourhop bench compare`: set-ups on the same cores, in alternating runs, and a report of them."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fourhop.bench import plot
from fourhop.bench.comparison import CompareConfig, alternate, plan_run, plan_setups
from fourhop.bench.findings import Findings, Measured
from fourhop.bench.launch import Site, running
from fourhop.bench.machine import describe_machine
from fourhop.bench.page import page
from fourhop.bench.report import Report, comparison_json, comparison_table, goodput_table
from fourhop.bench.result import Result
from fourhop.bench.runs import Bench, Plan, on_interrupt
from fourhop.bench.serve import INTERRUPTED, write
from fourhop.bench.setups import Setup
from fourhop.bench.sweep import milliseconds
from fourhop.bench.table import number
from fourhop.bench.vocabulary import open_vocabulary
from fourhop.tokens.connection import open_session
from fourhop.wire.errors import StartError


@dataclass(frozen=True)
class Lab:
    """Starts set-ups and measures them; what they write goes to `logs`."""

    bench: Bench
    logs: Path
    num_warmups: int

    async def measure(self, setup: Setup, plans: Sequence[Plan]) -> AsyncGenerator[Result, None]:
        """Start the set-up, warm it up, run the plans one after another, end it.

        Raises StartError, and KeyboardInterrupt for Ctrl-C before the first run or after the last.
        """
        async with self._ended() as stack:
            site = await self._start(setup, stack)
            for place, plan in enumerate(plans):
                target = dataclasses.replace(plan.target, base_url=site.url, metrics_url=site.metrics_urls)
                load = dataclasses.replace(plan.load, num_warmups=0 if place else self.num_warmups)
                title = f"{setup.name}, {plan.title}"
                result = await self.bench.run(dataclasses.replace(plan, target=target, load=load, title=title))
                yield result
                if result.is_cut:
                    return

    @asynccontextmanager
    async def _ended(self) -> AsyncIterator[AsyncExitStack]:
        """What is begun inside is ended, whatever Ctrl-C says meanwhile."""
        heard: list[bool] = []
        stack = AsyncExitStack()
        try:
            yield stack
        finally:
            with on_interrupt(lambda: heard.append(True)):
                await stack.aclose()
        if heard:
            raise KeyboardInterrupt

    async def _start(self, setup: Setup, stack: AsyncExitStack) -> Site:
        """Ctrl-C gives the start up, which ends what has begun."""
        try:
            async with asyncio.timeout(None) as patience:
                with on_interrupt(lambda: patience.reschedule(0.0)):
                    return await stack.enter_async_context(running(setup, self.bench.session, self.logs))
        except TimeoutError:
            raise KeyboardInterrupt from None


@asynccontextmanager
async def open_lab(model: str, logs: Path, num_warmups: int) -> AsyncIterator[Lab]:
    """Raises StartError if there is no such model."""
    async with open_session() as session:
        yield Lab(Bench(session, model, model, open_vocabulary(model)), logs, num_warmups)


@dataclass(frozen=True)
class Outcome:
    """What was measured, and what ended it early: a set-up that did not start, or Ctrl-C."""

    runs: list[Measured]
    failure: StartError | None = None
    is_cut: bool = False

    @property
    def status(self) -> int:
        """The exit status; what failed is told."""
        if self.failure is not None:
            print(f"fourhop: {self.failure}; the report is of what was measured before", file=sys.stderr)
            return 1
        if self.is_cut:
            return INTERRUPTED
        return 0 if any(run.result.is_success for run in self.runs) else 1


async def run_compare(model: str | None, config: CompareConfig) -> int:
    """Run everything, print the tables, write the report. Returns the exit status.

    Raises StartError, before anything was measured.
    """
    model = model or config.resolve().model
    setups = plan_setups(config, model)
    print_plan(config, setups)
    async with open_lab(model, config.output_dir / "logs", config.num_warmups) as lab:
        outcome = await compare_all(lab, config, setups, model)
    report = Report(config, model, Findings(outcome.runs), describe_machine())
    print(comparison_table(report))
    print()
    print(goodput_table(report))
    for path in write_report(report, config.output_dir):
        print(f"written: {path}")
    return outcome.status


async def compare_all(lab: Lab, config: CompareConfig, setups: Sequence[Setup], model: str) -> Outcome:
    """All runs, with a line for each. What ends them early, perhaps after hours, does not undo those that are done.

    Raises StartError or KeyboardInterrupt if none is.
    """
    runs: list[Measured] = []
    try:
        async for run in compare(lab, config, setups, model):
            runs.append(run)
            print(run_line(run), flush=True)
    except StartError as error:
        if not runs:
            raise
        return Outcome(runs, failure=error)
    except KeyboardInterrupt:
        if not runs:
            raise
        return Outcome(runs, is_cut=True)
    return Outcome(runs, is_cut=any(run.result.is_cut for run in runs))


async def compare(lab: Lab, config: CompareConfig, setups: Sequence[Setup], model: str) -> AsyncIterator[Measured]:
    """All runs, set-ups taking turns; ends early after Ctrl-C in one. Raises what `Lab.measure` does."""
    rates = config.resolve().rates
    for turn, setup in alternate(setups, config.rounds):
        plans = [
            dataclasses.replace(
                plan_run(config, model, rate, turn), title=f"{rate:g} req/s, round {turn + 1}/{config.rounds}"
            )
            for rate in rates
        ]
        place = 0
        async for result in lab.measure(setup, plans):
            yield Measured(setup, rates[place], turn, result)
            place += 1
            if result.is_cut:
                return


def print_plan(config: CompareConfig, setups: Sequence[Setup]) -> None:
    """What will be run, before it is."""
    preset = config.resolve()
    print(f"limits: {' '.join(preset.limits)}; rates: {', '.join(f'{rate:g}' for rate in preset.rates)} req/s")
    for setup in setups:
        for command in setup.commands:
            print(f"{setup.name}: {command}")
    if not plot.is_available():
        print("no curves without matplotlib: pip install 'fourhop[plot]'")


def run_line(run: Measured) -> str:
    result = run.result
    times = (("TTFT p50", "ttft", 50), ("ITL p50", "itl", 50), ("ITL p99", "itl", 99))
    told = ", ".join(f"{title} {number(milliseconds(result, name, percent), 0)} ms" for title, name, percent in times)
    line = f"{run.setup.name}, {run.rate:g} req/s, round {run.round + 1}: {told}, {result.summary.failed} failed"
    return "\n".join([line, *(f"  warning: {text}" for text in result.warnings)])


def write_report(report: Report, folder: Path) -> list[Path]:
    """The JSON, the figure where it can be drawn, and the page. Raises StartError if they cannot be written."""
    written = [write(folder / "compare.json", comparison_json(report), appends=False)]
    svg = None
    if plot.is_available() and report.findings.runs:
        figure = plot.draw(report)
        svg = plot.as_svg(figure)
        written.append(_write(folder / "compare.png", plot.as_png(figure)))
    written.append(_write(folder / "compare.html", page(report, svg).encode()))
    return written


def _write(path: Path, data: bytes) -> Path:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror}") from None
    return path
