"""What a router does every second goes on, whatever happens."""

from __future__ import annotations

import asyncio
import logging

import pytest
from prometheus_client import CollectorRegistry, Counter

from contracts.token_server import until
from fakes import virtual_time
from fakes.fleet import bench
from fourhop.router.housekeeping import Housekeeping


def counter(registry: CollectorRegistry) -> Counter:
    return Counter("failures", "Failures", ["task"], registry=registry)


def test_a_task_that_fails_is_told_of_and_done_again_and_one_that_hangs_holds_up_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[str] = []

    async def fails() -> None:
        done.append("fails")
        raise KeyError("a bug")

    async def hangs() -> None:
        done.append("hangs")
        await asyncio.Event().wait()

    async def scenario() -> None:
        registry = CollectorRegistry()
        tasks = {"fails": fails, "hangs": hangs, "goes": lambda: done.append("goes")}
        housekeeping = Housekeeping(tasks, asyncio.sleep, counter(registry))
        housekeeping.start()
        await asyncio.sleep(5.5)
        assert [done.count(name) for name in ("fails", "hangs", "goes")] == [5, 1, 5]
        assert registry.get_sample_value("failures_total", {"task": "fails"}) == 5
        await housekeeping.close()

    virtual_time.run(scenario())
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 5 and all(record.exc_info for record in told)
    assert told[0].getMessage() == "housekeeping: fails failed"


def test_a_router_has_a_task_for_each_of_its_duties() -> None:
    async def scenario() -> None:
        async with bench() as one:
            for name in list(one.router.housekeeping._tasks):
                await one.router.housekeeping.do(name)
                assert one.count("fourhop_router_housekeeping_failures_total", task=name) == 0
            one.router.housekeeping._tasks["leases"] = lambda: 1 // 0  # type: ignore[index]
            await one.router.housekeeping.do("leases")
            assert one.count("fourhop_router_housekeeping_failures_total", task="leases") == 1

    asyncio.run(scenario())


def test_a_look_that_fails_unexpectedly_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with bench() as one:
            worker, looks = one.router.fleet.workers["http://p0"], asyncio.Semaphore(0)
            one.prefill[0].ill = ZeroDivisionError("a bug")  # type: ignore[assignment]

            async def sleep(seconds: float) -> None:
                await looks.acquire()

            one.router.fleet.sleep = sleep
            watching = asyncio.create_task(one.router.fleet._meet(worker))
            await asyncio.sleep(0)
            one.prefill[0].ill, worker.down = None, "ill"
            looks.release()
            await until(lambda: worker.down is None)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == ["a look at http://p0 failed"]
