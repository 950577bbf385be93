"""The threads in which templates and tokenizers run, so that the event loop goes on answering meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Thread
from typing import ParamSpec, TypeVar

from prometheus_client import Gauge
from starlette.requests import Request

from fourhop.service import until_disconnect
from fourhop.wire.errors import Unavailable

RETRY_AFTER_S = 1.0
"""By then a queue of ordinary requests has moved on."""

P = ParamSpec("P")
T = TypeVar("T")


class RenderWorkers:
    """A fixed number of threads; work waits in the order in which it came. `waiting` counts what is not done.

    At most `max_waiting` pieces of work wait or are done at once; more are refused.
    """

    def __init__(self, num_workers: int, waiting: Gauge, *, max_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="render")
        self._waiting = waiting
        self._num_waiting = 0
        self._max_waiting = max_waiting

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The work's result, or what it raised. When the caller is cancelled, work that has not begun is dropped.

        Raises Unavailable when the queue is full.
        """
        if self._num_waiting >= self._max_waiting:
            raise Unavailable("too many requests wait to be rendered", retry_after_s=RETRY_AFTER_S)
        self._num_waiting += 1
        try:
            with self._waiting.track_inprogress():
                return await asyncio.wrap_future(self._pool.submit(work, *args, **kwargs))
        finally:
            self._num_waiting -= 1

    async def run_for(self, request: Request, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `run`, for a client: when it goes away, work that has not begun is dropped and ClientDisconnect raised."""
        return await until_disconnect(request, self.run(work, *args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def beside(work: Callable[[Callable[[], bool]], object]) -> Iterator[None]:
    """Do something on a thread of its own meanwhile. `work` gets what tells it to stop, and is waited for."""
    stopping = Event()
    thread = Thread(target=work, args=(stopping.is_set,), name="beside")
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
