"""Who is alive: verdicts, backoff, recovery by probe, and counters that probes never touch."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing

import pytest

from contracts.token_server import chunks_of, tokens_of, until
from fakes.fleet import Bench, Clock, bench
from fakes.stub_engine import Fault, StubEngine
from fourhop.router.config import RouterConfig
from fourhop.router.fleet import Fleet
from fourhop.router.verdict import Verdict, backoff_s, judge
from fourhop.router.worker import Worker
from fourhop.wire.errors import (
    ClientError,
    EngineError,
    EnginesDisagree,
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
        (refused(501), Verdict.REQUEST),
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
        (EnginesDisagree("x"), Verdict.FLEET),
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


def test_why_an_engine_is_not_there_at_the_start_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        fleet, worker = watched(engine := StubEngine("http://p0"), Clock())
        engine.ill = PeerError("cannot connect to http://p0: Connection refused")
        for _ in range(3):
            await fleet.look(worker)
        assert [record.message for record in caplog.records] == [f"engine http://p0 is down: {engine.ill.message}"]
        engine.ill = None
        await fleet.look(worker)
        assert worker.down is None

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


async def silence(one: Bench, engine: StubEngine, seconds: float) -> None:
    """Looks at an engine that does not answer, at a few moments of a while."""
    engine.ill = PeerTimeout(f"timed out waiting to hear from {engine.name}")
    for _ in range(4):
        one.clock.now_s += seconds / 4
        await one.router.fleet.look(one.router.fleet.workers[engine.name])


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("num_sent", [-1, 0, 1, 3])
def test_an_engine_that_falls_silent_loses_its_requests_to_others(side: str, num_sent: int) -> None:
    """A stopped process keeps its connections: only looks tell that nothing will come."""

    async def scenario() -> None:
        async with bench(2, 2) as one:
            request = GenerateRequest(token_ids=[1], sampling_params=SamplingParams(max_tokens=6, seed=1))
            silent: StubEngine = getattr(one, side)[0]
            silent.faults = [Fault(num_sent, None)]
            reader = asyncio.create_task(chunks_of(one.router, request))
            await until(lambda: bool(silent._cuts) or reader.done())
            await silence(one, silent, 8.0)
            assert len(tokens_of(await reader)) == 6
            silent.ill = None
            await one.settle()

    run(scenario())


def test_an_engine_is_not_given_up_before_its_time_or_while_its_streams_go_on() -> None:
    async def scenario() -> None:
        async with bench(1, 0) as one:
            request = GenerateRequest(token_ids=[1], sampling_params=SamplingParams(max_tokens=9, seed=1))
            worker = one.router.fleet.workers["http://p0"]
            async with aclosing(one.router.generate(request)) as chunks:
                received = [await anext(chunks)]
                await one.look()
                await silence(one, one.prefill[0], 4.0)
                assert one.router.fleet.num_given_up == 0
                received.append(await anext(chunks))
                one.clock.now_s += 2.0
                await one.look()
                assert one.router.fleet.num_given_up == 0, "it spoke since the last look"
                await silence(one, one.prefill[0], 8.0)
                assert one.router.fleet.num_given_up > 0
                assert worker.down == "not heard of for 5 s"
                one.prefill[0].ill = None
                received += [chunk async for chunk in chunks]
            assert len(tokens_of(received)) == 9

    run(scenario())


def test_an_engine_is_given_up_once_while_nobody_reads_what_its_request_met(caplog: pytest.LogCaptureFixture) -> None:
    """A decode leg that was sent ahead stays with it until prefill is done."""

    async def scenario() -> None:
        fleet, worker = watched(engine := StubEngine("http://p0"), clock := Clock())
        for number_before in (0, 1):
            engine.ill = None
            await fleet.look(worker)
            worker.in_flight = 1
            engine.ill = PeerTimeout("slow")
            for _ in range(12):
                clock.now_s += 1.0
                await fleet.look(worker)
            assert fleet.num_given_up == number_before + 1
        assert sum("is given up" in record.message for record in caplog.records) == 2

    run(scenario())


def test_the_last_look_at_a_silent_engine_does_not_outlast_its_time() -> None:
    fleet, worker = watched(StubEngine("http://p0"), clock := Clock())
    worker.last_seen_s = clock.now_s
    assert fleet._patience_s(worker) is None
    worker.num_timeouts = 1
    clock.now_s += 4.0
    assert fleet._patience_s(worker) == 1.0
    clock.now_s += 4.0
    assert fleet._patience_s(worker) == 0.1


def test_a_draining_engine_gets_nothing_and_says_so() -> None:
    async def scenario() -> None:
        async with bench(1, 1) as one:
            for engine in one.engines:
                await one.router.migration.drain(engine.name)
            with pytest.raises(Unavailable, match=r"http://p0 \(prefill\): draining"):
                await chunks_of(one.router, GenerateRequest(token_ids=[1], sampling_params=SamplingParams()))
            assert one.count("fourhop_router_draining", engine="http://p0", role="prefill") == 1
            for engine in one.engines:
                await one.router.migration.undrain(engine.name)
            await chunks_of(one.router, GenerateRequest(token_ids=[1], sampling_params=SamplingParams(max_tokens=3)))
            await one.settle()

    run(scenario())


def test_an_engine_that_two_urls_lead_to_is_one(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with bench(num_decode=2) as one:
            first, second = one.decode
            second.info = first.info  # type: ignore[method-assign]
            for _ in range(3):
                one.clock.now_s += 10
                await one.look()
                assert one.router.fleet.workers[second.name].down == "it is http://d0 at another URL"
            assert sum("another URL" in record.message for record in caplog.records) == 1
            first.ill = PeerError("no way there")
            await one.look()
            await one.look()
            assert one.router.fleet.workers[second.name].down is None, "the way that is left"
            first.ill = None
            one.clock.now_s += 10
            await one.look()
            await one.look()
            downs = [one.router.fleet.workers[engine.name].down for engine in (first, second)]
            assert downs == [None, "it is http://d0 at another URL"]

    run(scenario())


def test_an_engine_with_another_model_gets_nothing() -> None:
    """A stream that it went on with would change its model in the middle."""

    async def scenario() -> None:
        async with bench(num_decode=2) as one:
            stranger = one.decode[0]
            stranger.model, stranger.fingerprint = "other", "weights-2"
            await one.look()
            down = one.router.fleet.workers[stranger.name].down
            assert down == "it has other, but http://p0 has toy"
            await chunks_of(one.router, GenerateRequest(token_ids=[1], sampling_params=SamplingParams(max_tokens=3)))
            assert stranger.requests == []
            stranger.fingerprint = "weights-1"
            one.clock.now_s += 10
            await one.look()
            assert one.router.fleet.workers[stranger.name].down is None

    run(scenario())
