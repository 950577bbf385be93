"""What a router does every second, whatever happens: each task on its own, so that none keeps another from its turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from prometheus_client import Counter

from fourhop.service.tasks import end_tasks

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 1.0
"""Between two turns of a task; leases are several times as long."""

Task = Callable[[], Awaitable[None] | None]


class Housekeeping:
    """Tasks by name. One that fails is told of, counted, and done again in its time."""

    def __init__(self, tasks: Mapping[str, Task], sleep: Callable[[float], Awaitable[None]], failures: Counter) -> None:
        self._tasks = tasks
        self._sleep = sleep
        self._failures = failures
        self._running: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._running = [asyncio.create_task(self._repeat(name), name=f"housekeeping: {name}") for name in self._tasks]

    async def close(self) -> None:
        await end_tasks(self._running)

    async def do(self, name: str) -> None:
        """One turn of one task."""
        try:
            done = self._tasks[name]()
            if done is not None:
                await done
        except Exception:  # a task of its own: nobody else would tell, and nobody do it again
            self._failures.labels(name).inc()
            log.exception("housekeeping: %s failed", name)

    async def _repeat(self, name: str) -> None:
        while True:
            await self._sleep(HOUSEKEEPING_S)
            await self.do(name)
