"""The threads in which templates and tokenizers run, so that the event loop goes on answering meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from prometheus_client import Gauge

P = ParamSpec("P")
T = TypeVar("T")


class RenderWorkers:
    """A fixed number of threads; work waits in the order in which it came. `waiting` counts what is not done."""

    def __init__(self, num_workers: int, waiting: Gauge) -> None:
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="render")
        self._waiting = waiting

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The work's result, or what it raised. When the caller is cancelled, work that has not begun is dropped."""
        with self._waiting.track_inprogress():
            return await asyncio.wrap_future(self._pool.submit(work, *args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
