"""Progress of loading weights: a bar on a terminal, else log lines that `fourhop up` turns into its own bar."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fourhop.service.logs import event

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the bytes loaded so far and their total."""

PERCENT = re.compile(r" loading percent=(\d+)$")


@contextmanager
def loading(what: str) -> Iterator[Progress]:
    """Shows how far loading is, until the block ends."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("loading {task.description}"), BarColumn(bar_width=20), DownloadColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """A log line for every quarter."""

    def __init__(self) -> None:
        self._quarter = -1

    def __call__(self, done: int, total: int) -> None:
        quarter = 4 * done // max(1, total)
        if quarter > self._quarter:
            self._quarter = quarter
            log.info(event("loading", percent=25 * quarter))


def percent_of(line: str) -> int | None:
    """The percentage that a line written by `loading` tells, None for any other line."""
    match = PERCENT.search(line)
    return int(match[1]) if match else None
