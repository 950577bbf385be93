"""The render queue: bounded, and its depth is told (case 19)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from fourhop.frontend.metrics import FrontendMetrics
from fourhop.frontend.workers import RenderWorkers, beside
from fourhop.wire.errors import Unavailable, error_headers


def test_a_full_queue_is_refused_and_takes_work_again() -> None:
    registry = CollectorRegistry()
    workers = RenderWorkers(1, FrontendMetrics(registry).render_waiting, max_waiting=2)
    release = threading.Event()

    async def main() -> None:
        held = [asyncio.create_task(workers.run(release.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        assert registry.get_sample_value("fourhop:render_waiting") == 2
        with pytest.raises(Unavailable) as refusal:
            await workers.run(int)
        assert (refusal.value.status, error_headers(refusal.value)) == (503, {"Retry-After": "1"})
        release.set()
        assert await asyncio.gather(*held) == [True, True]
        assert registry.get_sample_value("fourhop:render_waiting") == 0
        assert await workers.run(int) == 0

    asyncio.run(main())
    workers.close()


def test_a_caller_that_left_no_longer_counts() -> None:
    workers = RenderWorkers(1, FrontendMetrics(CollectorRegistry()).render_waiting, max_waiting=2)
    release = threading.Event()

    async def main() -> None:
        working = asyncio.create_task(workers.run(release.wait))
        left = asyncio.create_task(workers.run(int))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        waiting = asyncio.create_task(workers.run(int))
        await asyncio.sleep(0)
        release.set()
        assert list(await asyncio.gather(working, waiting)) == [True, 0]

    asyncio.run(main())
    workers.close()


def test_what_runs_beside_is_stopped_and_waited_for() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work(stopped: Callable[[], bool]) -> None:
        begun.set()
        while not stopped():
            pass
        ended.set()

    with beside(work):
        begun.wait()
        assert not ended.is_set()
    assert ended.is_set()
