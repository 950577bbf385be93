"""Faults that users of other systems reported, each with its right value, in virtual time. Numbers are those of
the cases in the issue: 62, 67, 68, 70, 71, 76."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from faults.calm import Calm, Plan, on_a_calm_day, request_of, right
from fourhop.engine.config import EngineConfig
from fourhop.kv.config import ConnectorOptions
from fourhop.tokens.server import collect
from fourhop.wire.errors import FourhopError, PeerRefused
from fourhop.wire.generate import GenerateRequest

HOLD: dict[str, Any] = {"do_remote_decode": True}
EARLY: dict[str, Any] = {"do_remote_decode": True, "early_ticket": True}
PROMPT = list(range(20, 36))


def with_transfer(request: GenerateRequest, transfer: dict[str, Any] | None) -> GenerateRequest:
    return msgspec.structs.replace(request, kv_transfer_params=transfer)


async def held(calm: Calm, request: GenerateRequest, name: str = "p0") -> GenerateRequest:
    """A request with the ticket of its prefill leg."""
    answer = await calm.answer(name, with_transfer(request, HOLD))
    assert answer.kv_transfer_params is not None
    return with_transfer(request, answer.kv_transfer_params)


async def early(calm: Calm, request: GenerateRequest) -> tuple[GenerateRequest, asyncio.Task[Any]]:
    """A request with its early ticket, and the prefill leg that goes on."""
    chunks = calm.server("p0").generate(with_transfer(request, EARLY))
    ticket = (await anext(chunks)).kv_transfer_params
    return with_transfer(request, ticket), asyncio.ensure_future(collect(chunks, model=None, created=0))


@pytest.mark.parametrize(("block_size", "length"), [(16, 1), (16, 10), (16, 15), (16, 16), (16, 17), (256, 10)])
@pytest.mark.parametrize("reads_memory", [False, True])
def test_a_prompt_shorter_than_a_block_is_handed_over(block_size: int, length: int, reads_memory: bool) -> None:
    """Case 62: no full block is a hand-over like any other."""

    async def scenario(calm: Calm) -> None:
        request = request_of(list(range(20, 20 + length)))
        assert await calm.tokens("d0", await held(calm, request)) == right(request)
        assert calm.machines["d0"].num_transfers == 1

    config = EngineConfig(block_size=block_size)
    on_a_calm_day(scenario, Plan({"p0": 8, "d0": 8}, config, reads_memory=reads_memory))


@pytest.mark.parametrize("reads_memory", [False, True])
def test_blocks_of_an_aborted_pull_are_nobodys_until_its_last_write(reads_memory: bool) -> None:
    """Case 67: A is aborted while its prompt is still computed and its blocks are written; B needs those blocks."""

    async def scenario(calm: Calm) -> None:
        first, second = request_of(PROMPT), request_of(list(range(50, 74)), 4)
        ticketed, prefill = await early(calm, first)
        pulling = asyncio.ensure_future(calm.tokens("d0", ticketed))
        await asyncio.sleep(0.01)
        pulling.cancel()
        assert await calm.tokens("d0", second) == right(second)
        await prefill

    config = EngineConfig(block_size=4, max_num_batched_tokens=4)
    on_a_calm_day(scenario, Plan({"p0": 8, "d0": 8}, config, reads_memory=reads_memory))


@pytest.mark.parametrize("decode_waits_s", [0.5, 3.0])
def test_a_lease_that_decode_asks_for_outlives_its_queue(decode_waits_s: float) -> None:
    """Case 68: a lease of 2.5 s is renewed while decode has no room, and the blocks are let go when it pulled them."""

    async def scenario(calm: Calm) -> None:
        calm.set_pace("d0", decode_waits_s / 30)
        busy = asyncio.ensure_future(calm.tokens("d0", request_of([11], 30)))
        await asyncio.sleep(0.01)
        request = request_of(PROMPT)
        assert await calm.tokens("d0", await held(calm, request)) == right(request)
        await busy

    config = EngineConfig(block_size=4, max_num_seqs=1)
    options = ConnectorOptions(kv_lease_duration=2.5, pull_timeout_s=2.0)
    on_a_calm_day(scenario, Plan(config=config, options=options))


@pytest.mark.parametrize("recompute", [False, True])
def test_an_expired_lease_is_never_read(recompute: bool) -> None:
    """Case 68: its blocks are another prompt's by now. The request fails by name, or is computed where it is."""

    async def scenario(calm: Calm) -> None:
        request, other = request_of(PROMPT), request_of(list(range(60, 84)), 4)
        ticketed = await held(calm, request)
        await asyncio.sleep(1.5)
        assert await calm.tokens("p0", other) == right(other)
        if recompute:
            assert await calm.tokens("d0", ticketed) == right(request)
        else:
            with pytest.raises(PeerRefused, match=r"KV transfer failed \((withdrawn|expired)\)"):
                await calm.tokens("d0", ticketed)

    on_a_calm_day(scenario, Plan({"p0": 8, "d0": 8}, recompute=recompute))


def test_a_read_that_ends_after_the_lease_is_not_believed() -> None:
    """Case 68: the producer's blocks are another prompt's when the last of them is read, and only it can know that."""

    async def scenario(calm: Calm) -> None:
        request, other = request_of(PROMPT), request_of(list(range(60, 88)), 4)
        reading = asyncio.ensure_future(calm.tokens("d0", await held(calm, request)))
        await asyncio.sleep(1.2)
        assert await calm.tokens("p0", other) == right(other)
        with pytest.raises(PeerRefused, match=r"KV transfer failed \((withdrawn|unreachable)\)"):
            await reading

    options = ConnectorOptions(kv_lease_duration=1.0, pull_timeout_s=5.0)
    on_a_calm_day(scenario, Plan({"p0": 8, "d0": 8}, options=options, reads_memory=True, read_s=0.6))


def test_a_write_that_ends_after_the_abort_hits_nobody() -> None:
    """Case 67: A leaves while its blocks are read, slowly; B needs them and is computed after the last write."""

    async def scenario(calm: Calm) -> None:
        first, second = request_of(PROMPT), request_of(list(range(50, 74)), 8)
        reading = asyncio.ensure_future(calm.tokens("d0", await held(calm, first)))
        await asyncio.sleep(0.3)
        reading.cancel()
        assert await calm.tokens("d0", second) == right(second)

    on_a_calm_day(scenario, Plan({"p0": 8, "d0": 8}, reads_memory=True, read_s=0.25))


@pytest.mark.parametrize("silently", [False, True])
def test_a_dead_decode_engine_frees_prefills_blocks_within_a_lease(silently: bool) -> None:
    """Case 68: killed while it waits for blocks that are still computed, and never seen again."""

    async def scenario(calm: Calm) -> None:
        ticketed, prefill = await early(calm, request_of(PROMPT))
        pulling = asyncio.ensure_future(calm.tokens("d0", ticketed))
        await asyncio.sleep(0.005)
        await calm.machines["d0"].crash(silently=silently)
        pulling.cancel()
        await prefill
        async with asyncio.timeout(2.0 + 1.0 + 0.5):  # what a pull may be silent for, a lease, and a little
            await calm.settle()

    on_a_calm_day(scenario, Plan(config=EngineConfig(block_size=4, max_num_batched_tokens=4)))


@pytest.mark.parametrize("name", ["p0", "d0"])
@pytest.mark.parametrize("silently", [False, True])
def test_an_engine_that_starts_anew_at_its_address_poisons_nothing(name: str, silently: bool) -> None:
    """Case 70: killed in the middle of requests; those end, and the twenty after it are all split and right."""

    async def scenario(calm: Calm) -> None:
        router = calm.new_router()
        async with router.running():

            async def ask(number: int) -> list[int] | FourhopError:
                request = request_of([20 + number, *PROMPT], 8)
                try:
                    answer = await collect(router.generate(request), model=None, created=0)
                except FourhopError as error:
                    return error
                assert answer.choices[0].token_ids == right(request)
                return answer.choices[0].token_ids

            caught = [asyncio.ensure_future(ask(number)) for number in range(4)]
            await asyncio.sleep(0.012)
            await calm.machines[name].crash(silently=silently)
            await calm.machines[name].boot()
            await asyncio.gather(*caught)
            await asyncio.sleep(2.0)
            before = calm.machines["d0"].num_transfers
            ends = await asyncio.gather(*(ask(number) for number in range(20)))
            assert not [end for end in ends if isinstance(end, FourhopError)]
            assert calm.machines["d0"].num_transfers - before == 20
            await calm.settle()
            assert not router.ledger.owed

    on_a_calm_day(scenario)


def test_one_id_for_many_requests_mixes_nothing_up() -> None:
    """Case 71: at the same time, and again while the first one's blocks are still held."""

    async def scenario(calm: Calm) -> None:
        requests = [request_of([20 + number] * (5 + number), 8, request_id="mine") for number in range(6)]
        tickets = [await held(calm, request) for request in requests]
        assert len({(ticket.kv_transfer_params or {})["ticket_id"] for ticket in tickets}) == len(requests)
        answers = await asyncio.gather(*(calm.tokens("d0", ticketed) for ticketed in tickets))
        assert list(answers) == [right(request) for request in requests]

    on_a_calm_day(scenario)


@pytest.mark.parametrize("num_requests", [2, 20])
def test_prompts_that_do_not_fit_together_wait_for_each_other(num_requests: int) -> None:
    """Case 76: decode has 8 blocks, each prompt takes 6 and comes in chunks of 2; all finish, one after the other."""

    async def scenario(calm: Calm) -> None:
        requests = [request_of([20 + number] * 21, 4) for number in range(num_requests)]

        async def split(request: GenerateRequest) -> list[int]:
            ticketed, prefill = await early(calm, request)
            tokens = await calm.tokens("d0", ticketed)
            await prefill
            return tokens

        answers = await asyncio.gather(*(split(request) for request in requests))
        assert list(answers) == [right(request) for request in requests]

    config = EngineConfig(block_size=4, max_num_batched_tokens=8)
    options = ConnectorOptions(kv_lease_duration=5.0, pull_timeout_s=2.0)
    on_a_calm_day(scenario, Plan({"p0": 24, "d0": 8}, config, options))
