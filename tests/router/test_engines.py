"""The router over real engines whose every token proves the KV it came from: hand-overs, turns, moves, crashes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from contracts.token_server import chunks_of, finishes_of, tokens_of, until, usage_of
from fakes.toy_fleet import SlowRunner, ToyFleet, toy_fleet
from fourhop.engine.toy import toy_output
from fourhop.router.ledger import HoldState
from fourhop.router.migration import MoveRequest
from fourhop.wire.generate import GenerateChunk, GenerateRequest, SamplingParams

LENGTHS = (1, 3, 4, 5, 16, 17, 60)


def ask(prompt: list[int], max_tokens: int = 8, **fields: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=1, **fields.pop("params", {}))
    return GenerateRequest(token_ids=prompt, sampling_params=params, request_id="r", **fields)


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


async def answer(fleet: ToyFleet, prompt: list[int], max_tokens: int = 8) -> list[int]:
    return tokens_of(await chunks_of(fleet.router, ask(prompt, max_tokens)))


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def prompt_of(length: int, start: int = 20) -> list[int]:
    return [start + (7 * place) % 90 for place in range(length)]


def test_hand_overs_change_nothing_one_by_one_and_all_at_once() -> None:
    async def scenario() -> None:
        async with toy_fleet(2, 2, kv_recompute_threshold=1000) as fleet:
            for length in LENGTHS:
                chunks = await chunks_of(fleet.router, ask(prompt_of(length)))
                assert tokens_of(chunks) == toy_output(prompt_of(length), 8)
                assert finishes_of(chunks) == ["length"]
                assert usage_of(chunks).completion_tokens == 8
            prompts = [prompt_of(length, start) for length in LENGTHS for start in (30, 50)]
            answers = await asyncio.gather(*(answer(fleet, prompt) for prompt in prompts))
            assert list(answers) == [toy_output(prompt, 8) for prompt in prompts]
            await fleet.settle()
            assert fleet.router.ledger.ended == {HoldState.PULLED: len(LENGTHS) * 3}
            assert fleet.count("fourhop_router_handover_seconds_count") == len(LENGTHS) * 3
            assert fleet.count("fourhop_router_transfer_seconds_count") == len(LENGTHS) * 3

    run(scenario())


def test_eos_as_first_token_closes_the_decode_leg() -> None:
    prompt = prompt_of(30)

    async def scenario() -> None:
        async with toy_fleet(eos_token_ids=frozenset(toy_output(prompt, 1))) as fleet:
            chunks = await chunks_of(fleet.router, ask(prompt))
            assert tokens_of(chunks) == toy_output(prompt, 1)
            assert finishes_of(chunks) == ["stop"]
            await fleet.settle()

    run(scenario())


@pytest.mark.parametrize("num_read", [1, 2, 5])
def test_a_client_that_leaves_leaves_nothing_behind(num_read: int) -> None:
    async def scenario() -> None:
        async with toy_fleet(runner=SlowRunner) as fleet:
            chunks = fleet.router.generate(ask(prompt_of(60), 100))
            await first_tokens(chunks, num_read)
            await chunks.aclose()
            await fleet.settle()
            assert await answer(fleet, prompt_of(9)) == toy_output(prompt_of(9), 8)

    run(scenario())


def test_clients_that_leave_before_their_first_token_leave_nothing_behind() -> None:
    async def scenario() -> None:
        async with toy_fleet() as fleet:
            for num_turns in (0, 1, 2, 4, 8, 12, 16, 24, 32, 64):
                reader = asyncio.create_task(answer(fleet, prompt_of(60), 100))
                await turns(num_turns)
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            await fleet.settle()
            assert await answer(fleet, prompt_of(9)) == toy_output(prompt_of(9), 8)

    run(scenario())


# Conversations.


def test_a_turn_goes_on_where_the_last_one_ended_and_prefill_computes_only_what_is_new() -> None:
    async def scenario() -> None:
        async with toy_fleet() as fleet:
            first = prompt_of(21)
            history = first + await answer(fleet, first, 23)
            second = history + prompt_of(10, 40)
            chunks = await chunks_of(fleet.router, ask(second))
            assert tokens_of(chunks) == toy_output(second, 8)
            details = usage_of(chunks).prompt_tokens_details
            assert details is not None and details.cached_tokens == 40, "all whole blocks of 43 known tokens"
            assert fleet.count("fourhop_router_prefix_tickets_total", outcome="used") == 1
            assert fleet.count("fourhop_router_prefix_tokens_total") == 40
            assert fleet.count("fourhop_router_prefix_matches_total", relation="extends") == 1
            await fleet.settle()

    run(scenario())


def test_a_prompt_that_leaves_what_is_held_uses_the_common_beginning() -> None:
    """A template that drops the last turn's thinking: slower, never wrong, and counted."""

    async def scenario() -> None:
        async with toy_fleet() as fleet:
            first = prompt_of(24)
            history = first + await answer(fleet, first, 24)
            second = history[:36] + prompt_of(12, 60)
            assert await answer(fleet, second) == toy_output(second, 8)
            assert fleet.count("fourhop_router_prefix_matches_total", relation="diverged") == 1
            assert fleet.count("fourhop_router_prefix_tokens_total") == 36
            await fleet.settle()

    run(scenario())


def test_salts_keep_conversations_apart() -> None:
    async def scenario() -> None:
        async with toy_fleet() as fleet:
            first = prompt_of(24)
            chunks = await chunks_of(fleet.router, ask(first, 24, cache_salt="mine"))
            second = first + tokens_of(chunks) + prompt_of(9, 60)
            for salt, relation in (("theirs", "none"), (None, "none"), ("mine", "extends")):
                chunks = await chunks_of(fleet.router, ask(second, cache_salt=salt))
                assert tokens_of(chunks) == toy_output(second, 8)
                assert fleet.count("fourhop_router_prefix_matches_total", relation=relation) >= 1
            assert fleet.count("fourhop_router_prefix_tickets_total", outcome="used") == 1
            await fleet.settle()

    run(scenario())


def test_a_restarted_holder_is_not_asked() -> None:
    async def scenario() -> None:
        async with toy_fleet() as fleet:
            first = prompt_of(24)
            second = first + await answer(fleet, first, 24) + prompt_of(9, 60)
            await fleet.decode[0].kill()
            await fleet.decode[0].start()
            worker = fleet.router.fleet.workers[fleet.decode[0].url]
            await until(lambda: worker.down is None and worker.epoch == fleet.decode[0].engine.info().epoch)
            assert await answer(fleet, second) == toy_output(second, 8)
            assert fleet.count("fourhop_router_prefix_matches_total", relation="none") == 2
            await fleet.settle()

    run(scenario())


# Moving.


async def first_tokens(chunks: Any, number: int) -> list[GenerateChunk]:
    """The chunks up to the one that brings this many tokens; what arrives together is one chunk."""
    received: list[GenerateChunk] = []
    while len(tokens_of(received)) < number:
        received.append(await anext(chunks))
    return received


async def rest_of(chunks: Any) -> list[GenerateChunk]:
    return [chunk async for chunk in chunks]


def test_a_drained_engine_hands_its_streams_on_with_their_kv() -> None:
    async def scenario() -> None:
        async with toy_fleet(1, 2, runner=SlowRunner) as fleet:
            prompts = [prompt_of(10, start) for start in (20, 30, 40, 50)]
            streams = [fleet.router.generate(ask(prompt, 300)) for prompt in prompts]
            received = await asyncio.gather(*(first_tokens(stream, 5) for stream in streams))
            drained = await fleet.router.migration.drain(fleet.decode[0].url)
            assert (drained.in_flight, drained.num_migrated) == (2, 2)
            rest = await asyncio.gather(*(rest_of(stream) for stream in streams))
            received = [begun + ended for begun, ended in zip(received, rest, strict=True)]
            assert [tokens_of(chunks) for chunks in received] == [toy_output(prompt, 300) for prompt in prompts]
            assert [finishes_of(chunks) for chunks in received] == [["length"]] * 4
            assert fleet.count("fourhop_router_moved_total", **{"with": "ticket"}) == 2
            assert fleet.router.fleet.workers[fleet.decode[0].url].in_flight == 0
            await fleet.settle()
            assert await answer(fleet, prompts[0][:7]) == toy_output(prompts[0][:7], 8)
            assert fleet.decode[0].engine.info().num_running == 0
            await fleet.router.migration.undrain(fleet.decode[0].url)
            assert len(fleet.router.fleet.candidates()) == 3

    run(scenario())


def test_the_only_decode_engine_hands_its_streams_to_a_prefill_engine() -> None:
    async def scenario() -> None:
        async with (
            toy_fleet(1, 1, runner=SlowRunner) as fleet,
            aclosing(fleet.router.generate(ask(prompt_of(10), 300))) as stream,
        ):
            received = await first_tokens(stream, 5)
            await fleet.router.migration.drain(fleet.decode[0].url)
            received += [chunk async for chunk in stream]
            assert tokens_of(received) == toy_output(prompt_of(10), 300)
            assert fleet.count("fourhop_router_moved_total", **{"with": "ticket"}) == 1
            await fleet.settle()

    run(scenario())


def test_one_request_is_moved_to_and_fro() -> None:
    async def scenario() -> None:
        async with (
            toy_fleet(1, 3, runner=SlowRunner) as fleet,
            aclosing(fleet.router.generate(ask(prompt_of(10), 300))) as stream,
        ):
            received = await first_tokens(stream, 4)
            workers = fleet.router.fleet.workers
            here = next(index for index, server in enumerate(fleet.decode) if workers[server.url].in_flight)
            for further in (2, 1, 1, 2):
                here = (here + further) % 3
                url = fleet.decode[here].url
                num_heard = fleet.router.fleet.workers[url].num_heard
                moved = await fleet.router.migration.move(MoveRequest("generate-tokens-r", url))
                assert moved.num_migrated == 1
                while fleet.router.fleet.workers[url].num_heard == num_heard:
                    received.append(await anext(stream))
            received += [chunk async for chunk in stream]
            assert tokens_of(received) == toy_output(prompt_of(10), 300)
            assert finishes_of(received) == ["length"]
            await fleet.settle()

    run(scenario())


# Crashes.


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("num_read", [0, 1, 2, 20])
def test_an_engine_that_is_killed_loses_nobodys_tokens(side: str, num_read: int) -> None:
    async def scenario() -> None:
        async with toy_fleet(2, 2, runner=SlowRunner) as fleet:
            prompts = [prompt_of(40, start) for start in (20, 30, 40, 50)]
            streams = [fleet.router.generate(ask(prompt, 80)) for prompt in prompts]
            readers = [asyncio.create_task(first_tokens(stream, max(1, num_read))) for stream in streams]
            if num_read:
                await asyncio.wait(readers)
            else:
                await turns(20)
            dying = getattr(fleet, side)[0]
            await dying.kill()
            for reader, stream, prompt in zip(readers, streams, prompts, strict=True):
                received = await reader + [chunk async for chunk in stream]
                assert tokens_of(received) == toy_output(prompt, 80)
                assert finishes_of(received) == ["length"]
            await dying.start()
            await fleet.settle()
            assert await answer(fleet, prompt_of(50)) == toy_output(prompt_of(50), 8)
            await fleet.settle()

    run(scenario())
