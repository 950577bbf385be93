"""A stock vLLM whose server answers for an engine that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from contracts.token_server import chunks_of, tokens_of, until
from fakes.fleet import Clock
from fakes.serving import serving
from fakes.stock_vllm import StockVLLM, output_of
from fourhop.tokens.connection import Timeouts, open_session
from fourhop.tokens.engine import RemoteEngine
from fourhop.tokens.motion import Motion, motion_of
from fourhop.wire.errors import PeerError
from fourhop.wire.generate import GenerateRequest, SamplingParams

PROMPT = [10, 11, 12]
METRICS = b"""# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 7.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 2.0
process_cpu_seconds_total 3.0
"""


def test_only_what_a_step_moves_counts() -> None:
    told = motion_of(METRICS)
    assert told is not None
    assert motion_of(METRICS.replace(b"process_cpu_seconds_total 3.0", b"process_cpu_seconds_total 4.0")) == told
    assert motion_of(METRICS.replace(b" 7.0", b" 8.0")) != told
    assert motion_of(METRICS.replace(b" 0.25", b" 0.26")) != told, "a part of a long prompt"
    assert motion_of(b"process_cpu_seconds_total 3.0\n") is None
    assert motion_of(b"vllm:kv_cache_usage_perc 0.25\n") is None


def test_the_metrics_are_read_a_few_times_in_the_time_of_a_verdict_and_only_while_tokens_are_owed() -> None:
    motion, looks = Motion(60.0), []
    for now in range(70):
        if motion.wants_a_look(owes=now >= 5, now_s=now):
            looks.append(now)
            motion.note(b"7", now)
    assert looks == [5, 20, 35, 50, 65]
    assert motion.is_still(65.0) and not motion.is_still(64.0)
    assert not motion.wants_a_look(owes=False, now_s=80.0)
    assert not motion.is_still(200.0), "it owed nothing meanwhile"


@dataclass
class Watched:
    """A stock engine that is looked at, and what it answers to the one request that it owes."""

    stock: StockVLLM
    engine: RemoteEngine
    clock: Clock
    answers: list[asyncio.Task[list[int]]] = field(default_factory=list)

    async def owe(self) -> None:
        request = GenerateRequest(
            token_ids=PROMPT, sampling_params=SamplingParams(max_tokens=3, temperature=0.0), request_id="r"
        )

        async def read() -> list[int]:
            return tokens_of(await chunks_of(self.engine, request))

        self.answers.append(asyncio.create_task(read()))
        await until(lambda: self.stock.num_open > 0)

    async def look_for(self, seconds: float, step_s: float = 15.0) -> None:
        """Look every few seconds. Raises PeerError when the engine is found ill."""
        until_s = self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            await self.engine.check()
            self.clock.now_s += step_s

    def hang(self) -> None:
        self.stock.gate = asyncio.Event()

    def go_on(self) -> None:
        assert self.stock.gate is not None
        self.stock.gate.set()


@asynccontextmanager
async def watched(*, is_plain: bool = False) -> AsyncIterator[Watched]:
    stock, clock = StockVLLM("e"), Clock()
    async with serving(stock.plain_app() if is_plain else stock.app()) as url, open_session() as session:
        engine = RemoteEngine(url, session, timeouts=Timeouts(), probe_timeout_s=0.1, stall_timeout_s=60.0, clock=clock)
        one = Watched(stock, engine, clock)
        await engine.check()
        yield one
        for answer in one.answers:
            answer.cancel()
        await asyncio.gather(*one.answers, return_exceptions=True)


@pytest.mark.parametrize("is_plain", [False, True])
def test_an_engine_that_hangs_while_its_server_is_well_is_found_out_and_well_again_when_it_goes_on(
    is_plain: bool,
) -> None:
    async def scenario() -> None:
        async with watched(is_plain=is_plain) as one:
            one.hang()
            await one.owe()
            await one.look_for(60.0)
            with pytest.raises(PeerError, match="makes no token although it has work"):
                await one.look_for(30.0)
            one.answers[0].cancel()
            with pytest.raises(PeerError, match="makes no token"):
                await one.look_for(30.0)  # nobody waits any more, and it hangs all the same
            one.go_on()
            await one.look_for(75.0)

    asyncio.run(scenario())


def test_an_engine_that_computes_a_long_prompt_part_by_part_is_well() -> None:
    async def scenario() -> None:
        async with watched() as one:
            one.hang()
            await one.owe()
            for _ in range(3):
                await one.look_for(50.0)
                one.stock.num_steps += 1
            one.go_on()
            assert await one.answers[0] == output_of(PROMPT, 3)

    asyncio.run(scenario())


def test_an_engine_whose_requests_wait_for_something_else_makes_a_token_when_asked() -> None:
    """Such as KV of another engine: no step moves anything, and still it is well."""

    async def scenario() -> None:
        async with watched() as one:
            one.hang()
            await one.owe()
            gate, one.stock.gate = one.stock.gate, None
            await one.look_for(135.0)
            assert len(one.stock.bodies) > 1, "it was asked for a token"
            assert gate is not None
            gate.set()
            assert await one.answers[0] == output_of(PROMPT, 3)

    asyncio.run(scenario())


def test_an_engine_that_owes_nothing_or_tells_nothing_is_not_suspected() -> None:
    async def scenario() -> None:
        async with watched() as one:
            await one.look_for(135.0)
            one.stock.tells_steps = False
            one.hang()
            await one.owe()
            await one.look_for(135.0)
            assert len(one.stock.bodies) == 1
            one.go_on()

    asyncio.run(scenario())
