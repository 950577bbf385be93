"""Beginnings that a decode engine has: asked for when it pays, given back on every way, never needed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest

from contracts.token_server import chunks_of, tokens_of, until
from fakes.fleet import Bench, bench
from fakes.stub_engine import Fault, next_token
from fourhop.router.config import GoodputConfig
from fourhop.router.ledger import HoldState
from fourhop.wire.errors import FourhopError, PeerError
from fourhop.wire.generate import GenerateChunk, GenerateRequest, SamplingParams

FIRST = list(range(20))


def ask(prompt: list[int], max_tokens: int = 30) -> GenerateRequest:
    return GenerateRequest(
        token_ids=prompt, sampling_params=SamplingParams(max_tokens=max_tokens, seed=11), request_id="r"
    )


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


async def first_turn(one: Bench) -> list[int]:
    """The prompt of the second turn: 16-token blocks 0 of the first prompt, 1 and 2 of its answer too, and more."""
    return FIRST + tokens_of(await chunks_of(one.router, ask(FIRST))) + [7] * 10


def outcome(one: Bench, name: str) -> float:
    return one.count("fourhop_router_prefix_tickets_total", outcome=name)


def test_prefill_is_given_what_decode_has_and_the_ticket_is_used_up() -> None:
    async def scenario() -> None:
        async with bench() as one:
            second = await first_turn(one)
            one.decode[0].prefix_tokens = 48
            await chunks_of(one.router, ask(second))
            [asked] = one.decode[0].prefixes
            assert asked.token_ids == second and asked.request_id.startswith("ours-")
            params = one.prefill[0].requests[1].kv_transfer_params
            assert params is not None and params["prefix"]["remote_num_tokens"] == 48
            assert outcome(one, "used") == 1
            assert one.count("fourhop_router_prefix_tokens_total") == 48
            assert one.router.ledger.ended == {HoldState.PULLED: 3}
            await one.settle()

    run(scenario())


def test_what_prefill_has_itself_is_not_asked_for() -> None:
    async def scenario() -> None:
        async with bench() as one:
            second = await first_turn(one)
            one.decode[0].prefix_tokens = 48
            for _ in range(3):
                await chunks_of(one.router, ask(second))
            assert len(one.decode[0].prefixes) == 1
            await one.settle()

    run(scenario())


def test_less_than_the_threshold_is_not_worth_it() -> None:
    async def scenario() -> None:
        async with bench(kv_recompute_threshold=64) as one:
            await chunks_of(one.router, ask(await first_turn(one)))
            assert one.decode[0].prefixes == []

    run(scenario())


@pytest.mark.parametrize(
    ("num_tokens", "error", "name"),
    [(0, None, "gone"), (48, PeerError("no answer"), "failed")],
)
def test_without_a_ticket_prefill_computes(num_tokens: int, error: FourhopError | None, name: str) -> None:
    async def scenario() -> None:
        async with bench() as one:
            second = await first_turn(one)
            one.decode[0].prefix_tokens, one.decode[0].prefix_error = num_tokens, error
            assert len(tokens_of(await chunks_of(one.router, ask(second)))) == 30
            assert one.prefill[0].requests[1].kv_transfer_params == {"do_remote_decode": True, "early_ticket": True}
            assert outcome(one, name) == 1
            await one.settle()

    run(scenario())


def test_an_engine_that_is_slow_to_give_a_prefix_is_not_waited_for() -> None:
    async def scenario() -> None:
        async with bench(prefix_timeout_s=0.01) as one:
            second = await first_turn(one)
            one.decode[0].prefix_tokens, one.decode[0].prefix_gate = 48, asyncio.Event()
            assert len(tokens_of(await chunks_of(one.router, ask(second)))) == 30
            assert outcome(one, "timeout") == 1
            await one.settle()
            assert one.decode[0].aborted, "the engine may have held something all the same"

    run(scenario())


def test_a_ticket_that_prefill_did_not_pull_is_given_back() -> None:
    async def scenario() -> None:
        async with bench() as one:
            second = await first_turn(one)
            one.decode[0].prefix_tokens, one.prefill[0].pulls_prefixes = 48, False
            assert len(tokens_of(await chunks_of(one.router, ask(second)))) == 30
            assert outcome(one, "unused") == 1
            await one.settle()
            assert one.router.ledger.ended[HoldState.RELEASED] == 1

    run(scenario())


def test_a_prefill_engine_that_dies_with_the_ticket_gives_it_back_and_the_next_gets_its_own() -> None:
    async def scenario() -> None:
        async with bench(2, 1) as one:
            second = await first_turn(one)
            one.decode[0].prefix_tokens = 48
            for engine in one.prefill:
                engine.pulls_prefixes = False
            one.prefill[1].faults = [Fault(-1, PeerError("gone"))]
            assert len(tokens_of(await chunks_of(one.router, ask(second)))) == 30
            assert len({asked.request_id for asked in one.decode[0].prefixes}) == 2
            await one.settle()

    run(scenario())


@pytest.mark.parametrize("num_turns", range(0, 40, 3))
def test_a_client_that_leaves_at_any_moment_of_its_second_turn_leaves_nothing_behind(num_turns: int) -> None:
    async def scenario() -> None:
        async with bench() as one:
            second = await first_turn(one)
            one.decode[0].prefix_tokens = 48
            reader = asyncio.create_task(chunks_of(one.router, ask(second)))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await one.settle()

    run(scenario())


def test_decode_goes_to_the_engine_that_has_the_beginning_unless_it_is_much_busier() -> None:
    async def scenario() -> None:
        async with bench(1, 3) as one:
            for _ in range(2):
                await chunks_of(one.router, ask([9] * 40, 4))
            second = await first_turn(one)
            [holder] = [
                engine for engine in one.decode if engine.requests[-1:] and engine.requests[-1].token_ids == FIRST
            ]
            holder.prefix_tokens = 48
            await chunks_of(one.router, ask(second))
            assert holder.requests[-1].token_ids == second
            one.router.fleet.workers[holder.name].in_flight += 5
            await chunks_of(one.router, ask([*second, 8]))
            assert holder.requests[-1].token_ids == second
            one.router.fleet.workers[holder.name].in_flight -= 5
            await one.settle()

    run(scenario())


def test_the_stub_makes_the_tokens_that_the_tests_expect() -> None:
    async def scenario() -> None:
        async with bench() as one:
            second = await first_turn(one)
            one.decode[0].prefix_tokens = 48
            request, output = ask(second), list[int]()
            for _ in range(30):
                output.append(next_token(request, output))
            assert tokens_of(await chunks_of(one.router, request)) == output
            await until(one.is_idle)

    run(scenario())


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(0, 2), (2, 0), (2, 1), (0, 3)])
def test_wherever_there_is_a_choice_a_prompt_goes_where_its_beginning_is(num_prefill: int, num_decode: int) -> None:
    """Two replicas are one: each of them would be given every other turn."""

    async def scenario() -> None:
        async with bench(num_prefill, num_decode) as one:
            for number in range(6):
                await chunks_of(one.router, ask([*range(40), number], max_tokens=3))
            side = one.prefill or one.decode
            assert sorted(len(engine.requests) for engine in side) == [0] * (len(side) - 1) + [6]

    run(scenario())


async def waits_for_a_ticket(one: Bench) -> tuple[asyncio.Task[list[GenerateChunk]], asyncio.Event]:
    """A second turn whose decode engine was asked for its beginning, and what that engine waits for to answer."""
    second = await first_turn(one)
    gate = one.decode[0].prefix_gate = asyncio.Event()
    one.decode[0].prefix_tokens = 48
    waiting = asyncio.create_task(chunks_of(one.router, ask(second)))
    await until(lambda: len(one.decode[0].prefixes) == 1)
    return waiting, gate


def test_who_waits_for_a_ticket_keeps_nobody_from_being_let_in() -> None:
    """With targets requests are let in one by one: a prompt has its place before its beginning is asked for."""

    async def scenario() -> None:
        async with bench(goodput=GoodputConfig(ttft_ms=60_000.0), prefix_timeout_s=60.0) as one:
            waiting, gate = await waits_for_a_ticket(one)
            assert len(one.router.fleet.workers["http://p0"].backlog.prompts) == 1
            await asyncio.gather(*(chunks_of(one.router, ask([90 + number] * 5, 2)) for number in range(5)))
            assert not waiting.done()
            gate.set()
            await waiting
            await one.settle()
            assert not one.router.fleet.workers["http://p0"].backlog.prompts

    run(scenario())


def test_who_leaves_while_it_waits_for_a_ticket_leaves_its_place() -> None:
    async def scenario() -> None:
        async with bench(goodput=GoodputConfig(ttft_ms=60_000.0), prefix_timeout_s=60.0) as one:
            waiting, gate = await waits_for_a_ticket(one)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert not one.router.fleet.workers["http://p0"].backlog.prompts
            gate.set()
            await one.settle()

    run(scenario())
