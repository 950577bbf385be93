"""A comparison that does not get to its end: what was measured is told all the same."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from fakes.bench_records import good, result_of
from fourhop.bench import compare, plot
from fourhop.bench.comparison import CompareConfig, plan_setups
from fourhop.bench.result import Result
from fourhop.bench.runs import Bench, Plan
from fourhop.bench.setups import Setup
from fourhop.wire.errors import StartError

OUT_OF_MEMORY = StartError("it ended: out of memory")


class PlayedLab:
    """Measures as many set-ups as it is told to; the next one does not start."""

    def __init__(self, num_starts: int, cause: BaseException) -> None:
        self.num_starts = num_starts
        self.cause = cause

    async def measure(self, setup: Setup, plans: Sequence[Plan]) -> AsyncIterator[Result]:
        if self.num_starts == 0:
            raise self.cause
        self.num_starts -= 1
        for _ in plans:
            yield result_of([good()])


def compared(
    monkeypatch: pytest.MonkeyPatch, folder: Path, num_starts: int, cause: BaseException = OUT_OF_MEMORY
) -> int:
    @asynccontextmanager
    async def open_lab(model: str, logs: Path, num_warmups: int) -> AsyncIterator[PlayedLab]:
        yield PlayedLab(num_starts, cause)

    monkeypatch.setattr(compare, "open_lab", open_lab)
    monkeypatch.setattr(plot, "is_available", lambda: False)
    folder.mkdir(exist_ok=True)
    config = CompareConfig(request_rates="1", chunk_budgets="default", rounds=2, output_dir=folder)
    return asyncio.run(compare.run_compare("m", config))


def test_a_set_up_that_fails_to_start_later_on_leaves_a_report_of_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(monkeypatch, tmp_path, num_starts=3) == 1
    assert "it ended: out of memory; the report is of what was measured before" in capsys.readouterr().err
    written = msgspec.json.decode((tmp_path / "compare.json").read_bytes())
    assert [(run["setup"], run["round"]) for run in written["runs"]] == [
        ("split 1:1", 0),
        ("2 replicas, default budget", 0),
        ("2 replicas, default budget", 1),
    ]
    assert "2 replicas, default budget" in (tmp_path / "compare.html").read_text()


def test_where_nothing_was_measured_there_is_nothing_to_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="out of memory"):
        compared(monkeypatch, tmp_path, num_starts=0)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_a_set_up_starts_leaves_a_report_of_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert compared(monkeypatch, tmp_path, num_starts=3, cause=KeyboardInterrupt()) == 130
    assert len(msgspec.json.decode((tmp_path / "compare.json").read_bytes())["runs"]) == 3


@pytest.mark.parametrize("moment", ["start", "end"])
def test_ctrl_c_gives_up_a_start_and_waits_for_an_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moment: str
) -> None:
    seen: list[str] = []

    async def at(here: str) -> None:
        seen.append(here)
        if here == moment:
            signal.raise_signal(signal.SIGINT)
            for _ in range(5):  # until the loop has heard of it
                await asyncio.sleep(0)
            if here == "start":
                await asyncio.Event().wait()

    @asynccontextmanager
    async def running(*_: object) -> AsyncIterator[None]:
        try:
            await at("start")
            yield
        finally:
            await at("end")
            seen.append("ended")

    async def scenario() -> None:
        async with aclosing(lab.measure(Setup("slow", "split", ()), [])) as results:
            with pytest.raises(KeyboardInterrupt):
                await anext(results)

    monkeypatch.setattr(compare, "running", running)
    lab = compare.Lab(cast("Bench", SimpleNamespace(session=None)), tmp_path, 0)
    asyncio.run(scenario())
    assert seen == ["start", "end", "ended"]


def test_a_whole_comparison_succeeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert compared(monkeypatch, tmp_path, num_starts=4) == 0


@pytest.mark.parametrize(
    "config",
    [
        CompareConfig(setup=("a=--x", "a=--y")),
        CompareConfig(setup=("split 1:1=--placement auto",)),
        CompareConfig(chunk_budgets="512,512"),
    ],
)
def test_two_set_ups_of_one_name_would_be_taken_for_one(config: CompareConfig) -> None:
    with pytest.raises(StartError, match="two set-ups are called"):
        plan_setups(config, "m")
