"""The router's own choice on engines that take their time: as good as always local and always split, at every load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import pytest

from fakes import virtual_time
from fakes.timed_engine import Speed, TimedFleet, timed_fleet
from fakes.virtual_time import now
from fourhop.wire.errors import Unavailable
from fourhop.wire.generate import GenerateRequest, SamplingParams

SPEED = Speed()
SHARED = Speed(0.055, 0.0026, 0.012, 0.00005, slowdown=1.4)
"""About what two real engines take for a small model on two threads of one core."""

WARM_UP = 4
"""Requests that are not counted: nothing is known at first."""

Draw = Callable[[random.Random], tuple[int, int]]


@dataclass(frozen=True)
class Served:
    """What a client saw of a request of `num_prompt` tokens."""

    num_prompt: int
    ttft_s: float
    tpot_s: float

    def is_good(self, speed: Speed) -> bool:
        """Within four times the time of an idle engine for the first token, and twice for the others.

        An engine that shares its core is timed alone half of the time.
        """
        alone_s = speed.step_s + self.num_prompt * speed.prompt_token_s
        part = sqrt(speed.slowdown)
        return self.ttft_s <= 4 * alone_s * part and self.tpot_s <= 2 * (speed.step_s + speed.stream_s) * part


def mixed(rng: random.Random) -> tuple[int, int]:
    """Short questions, and among them long documents."""
    return (rng.randint(16, 64), 32) if rng.random() < 0.6 else (rng.randint(512, 1500), 64)


def long(rng: random.Random) -> tuple[int, int]:
    return rng.randint(512, 1024), 64


def short(rng: random.Random) -> tuple[int, int]:
    return rng.randint(8, 64), 64


def even(rng: random.Random) -> tuple[int, int]:
    """Everything from short to long, prompts and answers."""
    return rng.randint(51, 973), rng.randint(7, 122)


def chat(rng: random.Random) -> tuple[int, int]:
    return rng.randint(64, 256), rng.randint(16, 256)


def heavy(rng: random.Random) -> tuple[int, int]:
    return rng.randint(1024, 2048), 16


async def serve(fleet: TimedFleet, number: int, num_prompt: int, num_output: int, at_s: float) -> Served:
    await asyncio.sleep(at_s - now())
    params = SamplingParams(max_tokens=num_output, ignore_eos=True)
    request = GenerateRequest(token_ids=[number % 900 + 1] + [7] * (num_prompt - 1), sampling_params=params)
    times = []
    async for chunk in fleet.router.generate(request):
        times += [now() for choice in chunk.choices for _ in choice.token_ids]
    assert len(times) == num_output
    return Served(num_prompt, times[0] - at_s, (times[-1] - times[0]) / (num_output - 1))


async def serve_all(
    placement: str,
    draw: Draw,
    rate: float,
    count: int,
    fleet_size: tuple[int, int],
    seed: int = 0,
    speed: Speed = SPEED,
    **targets: Any,
) -> list[Served]:
    """What was served; with targets some are refused."""
    rng, at_s = random.Random(seed), 0.0
    async with timed_fleet(*fleet_size, speed=speed, placement=placement, **targets) as fleet:
        open_requests = []
        for number in range(count):
            at_s += rng.expovariate(rate)
            open_requests.append(asyncio.create_task(serve(fleet, number, *draw(rng), at_s)))
        answers = await asyncio.gather(*open_requests, return_exceptions=True)
        await asyncio.sleep(1.0)
        assert all(engine.is_idle for engine in fleet.engines.values())
        for worker in fleet.router.fleet.workers.values():
            assert worker.in_flight == worker.backlog.num_streams() == 0
            assert not worker.backlog.prompts
        assert not fleet.router.ledger.owed
    refused = [answer for answer in answers if isinstance(answer, Unavailable)]
    served = [answer for answer in answers if isinstance(answer, Served)]
    assert len(served) + len(refused) == count
    assert targets or not refused
    return served


def goodput(
    placement: str,
    draw: Draw,
    rate: float,
    count: int = 80,
    fleet_size: tuple[int, int] = (1, 1),
    seed: int = 0,
    speed: Speed = SPEED,
) -> float:
    """The part of the requests that was served in time."""
    served = virtual_time.run(serve_all(placement, draw, rate, WARM_UP + count, fleet_size, seed, speed))[WARM_UP:]
    return sum(one.is_good(speed) for one in served) / count


@pytest.mark.parametrize(
    ("draw", "rate"), [(mixed, 0.4), (mixed, 1.2), (long, 0.3), (long, 0.6), (heavy, 0.3), (short, 2.0)]
)
def test_its_own_choice_is_as_good_as_the_better_of_both_at_every_load(draw: Draw, rate: float) -> None:
    auto, local, split = (goodput(placement, draw, rate) for placement in ("auto", "local", "split"))
    assert auto >= max(local, split)


def test_it_is_so_for_several_engines_of_a_kind() -> None:
    auto, local, split = (goodput(placement, mixed, 2.4, 80, (2, 2)) for placement in ("auto", "local", "split"))
    assert auto >= max(local, split)


@pytest.mark.parametrize(
    ("draw", "rate", "fleet_size", "margin"),
    [
        (heavy, 0.51, (1, 1), 0.1),  # long prompts, short answers, 80 % of capacity: a queue for prefill must not grow
        (short, 8.4, (2, 2), -0.02),  # decode is all there is: streams on every engine, before anything is known too
        (short, 4.2, (1, 1), -0.02),
        (long, 1.74, (3, 1), -0.02),  # split is best, and is not left
    ],
)
def test_it_is_as_good_where_one_form_is_far_better(
    draw: Draw, rate: float, fleet_size: tuple[int, int], margin: float
) -> None:
    """By at least this margin; where it is negative, while nothing is known yet costs the difference."""
    auto, local, split = (goodput(placement, draw, rate, 60, fleet_size) for placement in ("auto", "local", "split"))
    assert auto >= max(local, split) + margin


@pytest.mark.parametrize(("draw", "part"), [(long, 0.4), (long, 0.6), (even, 0.6), (even, 0.8), (heavy, 0.6)])
def test_it_is_as_good_on_engines_that_slow_each_other_down(draw: Draw, part: float) -> None:
    """What work takes changes with what the other engine does. To learn costs may cost some of the first requests."""
    rate = part * capacity(draw, SHARED, 2)
    auto, local, split = (goodput(placement, draw, rate, 80, speed=SHARED) for placement in ("auto", "local", "split"))
    assert auto >= max(local, split) - 0.03


@pytest.mark.parametrize(
    ("draw", "part", "fleet_size"),
    [
        (chat, 0.9, (1, 1)),
        (even, 0.9, (3, 1)),
        (even, 0.7, (1, 3)),
        (heavy, 1.0, (2, 2)),
        (short, 1.1, (3, 1)),
    ],
)
def test_it_is_as_good_for_other_mixes_and_sides(draw: Draw, part: float, fleet_size: tuple[int, int]) -> None:
    rate = part * capacity(draw, SPEED, sum(fleet_size))
    auto, local, split = (goodput(placement, draw, rate, 80, fleet_size) for placement in ("auto", "local", "split"))
    assert auto >= max(local, split) - 0.02


def capacity(draw: Draw, speed: Speed, num_engines: int) -> float:
    """Requests a second of so many engines that decode four streams at a time."""
    rng = random.Random(1)
    sizes = [draw(rng) for _ in range(500)]
    work_s = sum(one * speed.prompt_token_s + more * (speed.step_s / 4 + speed.stream_s) for one, more in sizes)
    return num_engines * len(sizes) / work_s / speed.slowdown


def test_requests_that_wait_for_their_turn_or_are_refused_make_more_of_an_overload() -> None:
    """Twice what the engines can take: some are refused so that others are in time."""
    freely = serve_all("auto", mixed, 2.5, 100, (1, 1))
    gated = serve_all("auto", mixed, 2.5, 100, (1, 1), ttft_ms=2500.0)

    def num_in_time(served: list[Served]) -> int:
        return sum(one.ttft_s <= 2.5 and one.tpot_s <= 2 * (SPEED.step_s + SPEED.stream_s) for one in served)

    in_time, without = num_in_time(virtual_time.run(gated)), num_in_time(virtual_time.run(freely))
    assert in_time > without


def test_it_is_the_same_each_time() -> None:
    assert len({goodput("auto", mixed, 1.2, 40) for _ in range(2)}) == 1


def test_engines_that_tell_no_moments_are_learned_from_when_their_tokens_come() -> None:
    async def scenario() -> None:
        async with timed_fleet(placement="auto", engine={"tells_moments": False}) as fleet:
            for number in range(12):
                await serve(fleet, number, 100 + 50 * number, 16, now())
            costs = fleet.router.fleet.costs
            assert costs.prefill.at(400) == pytest.approx(SPEED.step_s + 400 * SPEED.prompt_token_s, rel=0.1)
            assert costs.step.at(1) == pytest.approx(SPEED.step_s + SPEED.stream_s, rel=0.2)

    virtual_time.run(scenario())


def test_why_is_told_by_the_metric() -> None:
    async def scenario() -> None:
        async with timed_fleet(placement="auto") as fleet:
            for number in range(4):
                await serve(fleet, number, 600, 16, now())
            reasons = {"split", "decode_idle", "no_harm"}
            told = {why: fleet.count("fourhop_router_placements_total", reason=why) for why in reasons}
            assert told["split"] == 1  # nothing was known yet
            assert sum(told.values()) == 4

    virtual_time.run(scenario())
