"""With targets requests wait at the router, in order; one that cannot be in time hears so at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest

from fakes import virtual_time
from fakes.timed_engine import Speed, TimedFleet, timed_fleet
from fakes.virtual_time import now
from fourhop.wire.errors import FourhopError, Unavailable, error_headers
from fourhop.wire.generate import GenerateRequest, SamplingParams, Targets

SPEED = Speed()
PROMPT = 500
ALONE_S = SPEED.step_s + PROMPT * SPEED.prompt_token_s


def hash_of(name: str) -> int:
    """A small number that differs from name to name, so that no two prompts are alike."""
    return sum(map(ord, name)) % 97 + 1


async def ask(
    fleet: TimedFleet, name: str = "r", *, num_prompt: int = PROMPT, priority: int = 0, targets: Targets | None = None
) -> float:
    """When its first token came."""
    request = GenerateRequest(
        token_ids=[int(now() * 1e3) % 900 + hash_of(name), *[7] * (num_prompt - 1)],
        sampling_params=SamplingParams(max_tokens=8, ignore_eos=True),
        request_id=name,
        priority=priority,
        targets=targets,
    )
    times = []
    async for chunk in fleet.router.generate(request):
        times += [now() for choice in chunk.choices for _ in choice.token_ids]
    return times[0]


async def teach(fleet: TimedFleet) -> None:
    for _ in range(3):
        await ask(fleet)
    await asyncio.sleep(10.0)


def run(scenario: Coroutine[None, None, None]) -> None:
    virtual_time.run(scenario)


async def check_rest(fleet: TimedFleet) -> None:
    await asyncio.sleep(60.0)
    assert fleet.count("fourhop_router_queued") == 0
    assert all(engine.is_idle for engine in fleet.engines.values())
    for worker in fleet.router.fleet.workers.values():
        assert worker.in_flight == worker.backlog.num_streams() == len(worker.backlog.prompts) == 0


@pytest.mark.parametrize("placement", ["split", "auto", "local"])
def test_what_cannot_be_in_time_is_refused_with_when_to_come_again(placement: str) -> None:
    async def scenario() -> None:
        async with timed_fleet(placement=placement, ttft_ms=3500.0) as fleet:
            await teach(fleet)
            start_s = now()
            answers = await asyncio.gather(*(ask(fleet, str(n)) for n in range(10)), return_exceptions=True)
            refused = [answer for answer in answers if isinstance(answer, FourhopError)]
            served = [answer for answer in answers if isinstance(answer, float)]
            assert len(served) + len(refused) == 10
            assert 3 <= len(served) < 10
            assert all(first_s - start_s <= 3.5 + ALONE_S for first_s in served)
            assert all(isinstance(error, Unavailable) and error.status == 503 for error in refused)
            assert all(1 <= int(error_headers(error)["Retry-After"]) <= 10 for error in refused)
            assert fleet.count("fourhop_router_shed_total", cause="late") == len(refused)
            await check_rest(fleet)

    run(scenario())


def test_coming_again_when_told_is_in_time() -> None:
    async def scenario() -> None:
        async with timed_fleet(ttft_ms=3500.0) as fleet:
            await teach(fleet)
            others = [asyncio.create_task(ask(fleet, str(n))) for n in range(3)]
            await asyncio.sleep(0.01)
            with pytest.raises(Unavailable) as refusal:
                await ask(fleet, "late")
            await asyncio.sleep(float(error_headers(refusal.value)["Retry-After"]))
            start_s = now()
            assert await ask(fleet, "again") - start_s <= 3.5
            await asyncio.gather(*others)

    run(scenario())


def test_the_earliest_deadline_goes_first_and_before_it_the_higher_priority() -> None:
    async def scenario() -> None:
        async with timed_fleet(ttft_ms=60_000.0) as fleet:
            await teach(fleet)
            tasks = [asyncio.create_task(ask(fleet, f"first-{n}")) for n in range(2)]
            await asyncio.sleep(0.01)
            late = asyncio.create_task(ask(fleet, "late"))
            await asyncio.sleep(0.01)
            early = asyncio.create_task(ask(fleet, "early", targets=Targets(ttft_ms=20_000.0)))
            await asyncio.sleep(0.01)
            urgent = asyncio.create_task(ask(fleet, "urgent", priority=-1))
            await asyncio.sleep(0.01)
            assert fleet.count("fourhop_router_queued") == 3
            first = [await task for task in (urgent, early, late)]
            assert first == sorted(first) and len(set(first)) == 3
            await asyncio.gather(*tasks)
            await check_rest(fleet)

    run(scenario())


def test_one_that_goes_away_leaves_the_queue() -> None:
    async def scenario() -> None:
        async with timed_fleet(ttft_ms=60_000.0) as fleet:
            await teach(fleet)
            tasks = [asyncio.create_task(ask(fleet, str(n))) for n in range(5)]
            await asyncio.sleep(0.01)
            assert fleet.count("fourhop_router_queued") == 3
            for task in tasks[1:4]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert tasks[0].result() and tasks[4].result()
            await check_rest(fleet)

    run(scenario())


def test_a_full_queue_takes_no_more() -> None:
    async def scenario() -> None:
        async with timed_fleet(ttft_ms=60_000.0, max_queued=1) as fleet:
            await teach(fleet)
            answers = await asyncio.gather(*(ask(fleet, str(n)) for n in range(5)), return_exceptions=True)
            assert sum(isinstance(answer, Unavailable) for answer in answers) == 2
            assert fleet.count("fourhop_router_shed_total", cause="queue_full") == 2
            await check_rest(fleet)

    run(scenario())


def test_a_stream_waits_for_a_place_where_all_keep_their_pace() -> None:
    async def scenario() -> None:
        async with timed_fleet(itl_ms=26.5) as fleet:
            for num_together in (1, 2, 3, 4, 4):  # each stream makes a step 2 ms longer: three keep below 26.5 ms
                await asyncio.gather(*(ask(fleet, str(n), num_prompt=16) for n in range(num_together)))
            most = 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, len(fleet.router.fleet.workers["http://d0"].backlog.streams))
                    await asyncio.sleep(0.005)

            watcher = asyncio.create_task(watch())
            await asyncio.gather(*(ask(fleet, str(n), num_prompt=16) for n in range(12)))
            watcher.cancel()
            assert 1 <= most <= 4
            await check_rest(fleet)

    run(scenario())


def test_nobody_waits_for_ever_when_every_engine_is_gone() -> None:
    async def scenario() -> None:
        async with timed_fleet(ttft_ms=30_000.0) as fleet:
            await teach(fleet)
            tasks = [asyncio.create_task(ask(fleet, str(n))) for n in range(5)]
            await asyncio.sleep(0.01)
            for worker in fleet.router.fleet.workers.values():
                worker.down = "gone"
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(answer, (float, FourhopError)) for answer in answers)
            assert sum(isinstance(answer, Unavailable) for answer in answers) >= 3

    run(scenario())


def test_without_targets_nothing_waits_here() -> None:
    async def scenario() -> None:
        async with timed_fleet() as fleet:
            await teach(fleet)
            tasks = [asyncio.create_task(ask(fleet, str(n))) for n in range(9)]
            await asyncio.sleep(0.01)
            assert fleet.count("fourhop_router_queued") == 0
            assert fleet.router.fleet.workers["http://p0"].in_flight == 9
            await asyncio.gather(*tasks)
            await check_rest(fleet)

    run(scenario())


@pytest.mark.parametrize(("num_choices", "num_waiting"), [(1, 0), (2, 0), (8, 1)])
def test_every_choice_of_a_request_takes_a_place(num_choices: int, num_waiting: int) -> None:
    """Beside a stream there is room for two more that keep their pace, and not for eight."""

    def request(name: str, n: int, max_tokens: int) -> GenerateRequest:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n)
        return GenerateRequest(token_ids=[hash_of(name)] * 16, sampling_params=params, request_id=name)

    async def read(fleet: TimedFleet, name: str, n: int, max_tokens: int) -> None:
        async for _ in fleet.router.generate(request(name, n, max_tokens)):
            pass

    async def scenario() -> None:
        async with timed_fleet(itl_ms=26.5) as fleet:
            for num_together in (1, 2, 3, 4, 4):
                await asyncio.gather(*(ask(fleet, str(n), num_prompt=16) for n in range(num_together)))
            await asyncio.sleep(1.0)
            stream = asyncio.create_task(read(fleet, "stream", 1, 400))
            await asyncio.sleep(1.0)
            several = asyncio.create_task(read(fleet, "several", num_choices, 8))
            await asyncio.sleep(0.5)
            assert fleet.count("fourhop_router_queued") == num_waiting
            await asyncio.gather(stream, several)
            await check_rest(fleet)

    run(scenario())
