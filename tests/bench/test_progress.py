"""The live line: a bar on a terminal, plain lines elsewhere, nothing if it is not wanted."""

from __future__ import annotations

import io

import pytest

from fakes.bench_records import bad, record
from fourhop.bench.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def show(stream: io.StringIO, *, is_shown: bool = True) -> str:
    clock = Clock()
    with ProgressLine("run", 4, lambda: 2, stream=stream, is_shown=is_shown, clock=clock) as line:
        for _ in range(40):
            clock.now_s += 0.5
            line.token()
        line.ended(record(0.0, 1.0))
        line.ended(bad())
    return stream.getvalue()


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    lines = show(io.StringIO()).splitlines()
    assert lines[-1] == "run: 2/4 2 open, 2 chunk/s, 1 failed"
    assert len(lines) == 3


def test_on_a_terminal_there_is_a_bar() -> None:
    assert "2/4" in show(Terminal())


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_it_can_be_left_out(stream: io.StringIO) -> None:
    assert show(stream, is_shown=False) == ""
