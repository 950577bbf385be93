"""The live line of a run: a bar on a terminal, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fourhop.bench.record import Record

PLAIN_EVERY_S = 10.0
BAR_EVERY_S = 0.25


class ProgressLine:
    """A `drive.Watch`, used as a context. Drawing is seldom enough that it does not disturb the time stamps.

    `num_open` tells how many requests are open.
    """

    def __init__(
        self,
        title: str,
        total: int,
        num_open: Callable[[], int],
        *,
        stream: TextIO = sys.stderr,
        is_shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._total = total
        self._num_open = num_open
        self._stream = stream
        self._clock = clock
        self._num_done = self._num_failed = self._num_chunks = 0
        self._start_s = self._shown_s = clock()
        self._is_plain = is_shown and not stream.isatty()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
        )
        shows_bar = is_shown and not self._is_plain
        # Without a thread of its own: it is drawn between two events, never beside them.
        self._bar = Progress(*columns, console=Console(file=stream), disable=not shows_bar, auto_refresh=False)
        self._task = self._bar.add_task(title, total=total, state="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._draw()
        self._bar.stop()

    def token(self) -> None:
        self._num_chunks += 1
        self._tick()

    def ended(self, record: Record) -> None:
        self._num_done += 1
        self._num_failed += not record.is_good
        self._tick()

    def _tick(self) -> None:
        if self._clock() - self._shown_s >= (PLAIN_EVERY_S if self._is_plain else BAR_EVERY_S):
            self._draw()

    def _draw(self) -> None:
        self._shown_s = self._clock()
        if self._is_plain:
            print(f"{self._title}: {self._num_done}/{self._total} {self.state()}", file=self._stream, flush=True)
        elif not self._bar.disable:
            self._bar.update(self._task, completed=self._num_done, state=self.state(), refresh=True)

    def state(self) -> str:
        """What goes on, in a few words."""
        elapsed_s = max(self._clock() - self._start_s, 1e-9)
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        return f"{self._num_open()} open, {self._num_chunks / elapsed_s:.0f} chunk/s{failed}"
