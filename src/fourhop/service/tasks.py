"""Tasks that run until they are cancelled, and what is too small to be one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel them and wait until all have ended, whatever they end with."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Aside:
    """Runs a coroutine that only waits, beside the task that does the work, and calls `then` once it has ended.

    A tenth of what a task costs, for each request that is watched. What is awaited in it are futures, or nothing. Close
    it whatever happens; `then` is not called after that.
    """

    def __init__(self, coroutine: Coroutine[asyncio.Future[Any] | None, None, None], then: Callable[[], None]) -> None:
        self.failure: Exception | None = None
        self._coroutine = coroutine
        self._then = then
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._step()

    def close(self) -> None:
        self._is_closed = True
        self._coroutine.close()

    def _step(self, _: object = None) -> None:
        """Go on to what the coroutine waits for next."""
        if self._is_closed:
            return
        try:
            awaited = self._coroutine.send(None)
        except StopIteration:
            self._loop.call_soon(self._end)
        except Exception as error:  # told of by who closes this
            self.failure = error
            self._loop.call_soon(self._end)
        else:
            if awaited is None:
                self._loop.call_soon(self._step)
            else:
                awaited.add_done_callback(self._step)

    def _end(self) -> None:
        if not self._is_closed:
            self._then()
