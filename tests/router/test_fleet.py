"""Who is alive: verdicts, backoff, recovery by probe, and counters that probes never touch."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest

from contracts.token_server import chunks_of
from fakes.fleet import Clock, bench
from fakes.stub_engine import StubEngine
from fourhop.router.config import RouterConfig
from fourhop.router.fleet import Fleet, Verdict, Worker, backoff_s, judge
from fourhop.wire.errors import (
    ClientError,
    EngineError,
    ErrorBody,
    FourhopError,
    PeerError,
    PeerRefused,
    PeerTimeout,
    TransferError,
    Unavailable,
)
from fourhop.wire.generate import GenerateRequest, SamplingParams

CONFIG = RouterConfig(("http://p0",), ())


def refused(status: int, type: str = "x") -> PeerRefused:
    return PeerRefused(status, ErrorBody("m", type, None, status))


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (refused(400), Verdict.REQUEST),
        (refused(404), Verdict.REQUEST),
        (ClientError("x"), Verdict.REQUEST),
        (refused(429), Verdict.BUSY),
        (refused(503), Verdict.BUSY),
        (Unavailable("x"), Verdict.BUSY),
        (refused(500), Verdict.FAULT),
        (EngineError("x"), Verdict.FAULT),
        (PeerError("x"), Verdict.FAULT),
        (PeerTimeout("x"), Verdict.FAULT),
        (TransferError("timeout", "x"), Verdict.TRANSFER),
        (refused(500, "TransferError"), Verdict.TRANSFER),
    ],
)
def test_verdicts(error: FourhopError, verdict: Verdict) -> None:
    assert judge(error) is verdict


def test_backoff_grows_to_its_bound() -> None:
    assert [backoff_s(faults, 2.0) for faults in range(6)] == [0.0, 0.25, 0.5, 1.0, 2.0, 2.0]
    assert backoff_s(10**6, 2.0) == 2.0


def watched(engine: StubEngine, clock: Clock) -> tuple[Fleet, Worker]:
    fleet = Fleet(CONFIG, clock)
    worker = Worker(engine.name, "prefill", engine, engine)
    fleet.workers = {worker.name: worker}
    return fleet, worker


def test_only_faults_take_an_engine_down() -> None:
    """Case 85: ten 400s and ten 503s leave it up; one 500 does not, and it recovers by probe after its backoff."""

    async def scenario() -> None:
        engine, clock = StubEngine("http://p0"), Clock()
        fleet, worker = watched(engine, clock)
        await fleet.look(worker)
        for _ in range(10):
            fleet.failed(worker, refused(400))
            fleet.failed(worker, refused(503))
            fleet.failed(worker, TransferError("timeout", "x"))
        assert worker.down is None and len(fleet.candidates()) == 1
        fleet.failed(worker, refused(500))
        assert worker.down == "m" and fleet.candidates() == []
        await fleet.look(worker)
        assert worker.down is not None, "up again before its backoff"
        clock.now_s += 0.25
        await fleet.look(worker)
        assert worker.down is None

    run(scenario())


def test_ten_failures_of_one_incident_count_once_and_repeated_incidents_wait_longer() -> None:
    async def scenario() -> None:
        engine, clock = StubEngine("http://p0"), Clock()
        fleet, worker = watched(engine, clock)
        waits = []
        for _ in range(4):
            clock.now_s += 10
            await fleet.look(worker)
            for _ in range(10):
                fleet.failed(worker, PeerError("reset"))
            waits.append(worker.retry_at_s - clock.now_s)
        assert waits == [0.25, 0.5, 1.0, 2.0]
        clock.now_s += 10
        await fleet.look(worker)
        fleet.succeeded(worker)
        fleet.failed(worker, PeerError("reset"))
        assert worker.retry_at_s - clock.now_s == 0.25

    run(scenario())


def test_one_slow_probe_is_forgiven_two_are_not() -> None:
    async def scenario() -> None:
        engine, clock = StubEngine("http://p0"), Clock()
        fleet, worker = watched(engine, clock)
        await fleet.look(worker)
        engine.ill = PeerTimeout("slow")
        await fleet.look(worker)
        assert worker.down is None
        await fleet.look(worker)
        assert worker.down == "slow"

    run(scenario())


def test_probes_never_touch_the_counters() -> None:
    """Case 85: slow requests while health checks run thirty rounds."""

    async def scenario() -> None:
        async with bench(1, 0) as one:
            request = GenerateRequest(token_ids=[1], sampling_params=SamplingParams(max_tokens=9, seed=1))
            readers = [one.router.generate(request) for _ in range(20)]
            for reader in readers:
                await anext(reader)
            worker = one.router.fleet.workers["http://p0"]
            for _ in range(30):
                await one.look()
                assert worker.in_flight == 20
            for reader in readers:
                await reader.aclose()
            assert worker.in_flight == 0

    run(scenario())


def test_watchers_look_often_at_a_well_engine_and_less_and_less_at_a_dead_one() -> None:
    async def scenario() -> None:
        engine, clock = StubEngine("http://p0"), Clock()
        waits: list[float] = []
        done = asyncio.Event()

        async def sleep(seconds: float) -> None:
            waits.append(seconds)
            clock.now_s += seconds
            if len(waits) == 2:
                engine.ill = PeerError("gone")
            if len(waits) == 7:
                engine.ill = None
            if len(waits) == 9:
                done.set()
                await asyncio.Event().wait()

        fleet = Fleet(CONFIG, clock, sleep)
        await fleet.start([Worker(engine.name, "prefill", engine, engine)])
        async with asyncio.timeout(5):
            await done.wait()
        await fleet.close()
        assert waits == [1.0, 1.0, 0.25, 0.5, 1.0, 2.0, 2.0, 1.0, 1.0]

    run(scenario())


def test_an_engine_that_is_not_there_at_the_start_is_waited_for() -> None:
    async def scenario() -> None:
        async with bench() as one:
            worker = one.router.fleet.workers["http://d0"]
            worker.down = "not seen yet"
            await one.look()
            assert worker.down is None
            request = GenerateRequest(token_ids=[1], sampling_params=SamplingParams(max_tokens=3, seed=1))
            await chunks_of(one.router, request)
            assert one.decode[0].num_pulled == 1

    run(scenario())
