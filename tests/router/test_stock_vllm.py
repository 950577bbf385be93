"""The router in front of stock vLLMs: hand-overs over NIXL are checked, used once and in time; and every way out."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from starlette.responses import Response

from contracts.token_server import chunks_of, finishes_of, tokens_of, until, usage_of
from fakes.stock_fleet import StockFleet, stock_fleet
from fakes.stock_vllm import EOS, StockVLLM, error, output_of
from fourhop.router.ledger import HoldState
from fourhop.wire.errors import FourhopError
from fourhop.wire.generate import GenerateRequest, SamplingParams

PROMPT = [10, 11, 12, 13, 14]
HANDLE = {
    "do_remote_prefill",
    "remote_engine_id",
    "remote_block_ids",
    "remote_request_id",
    "remote_host",
    "remote_port",
}
HANDLE |= {"tp_size"}


def ask(max_tokens: int | None = 8, **params: Any) -> GenerateRequest:
    settings = {"max_tokens": max_tokens, "temperature": 0.0} | params
    return GenerateRequest(token_ids=PROMPT, sampling_params=msgspec.convert(settings, SamplingParams), request_id="r")


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


async def failure_of(one: StockFleet, request: GenerateRequest) -> FourhopError:
    try:
        await chunks_of(one.router, request)
    except FourhopError as error:
        return error
    raise AssertionError("the stream ended well")


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.0}, {"min_tokens": 4}])
def test_a_split_request_makes_the_tokens_of_one_engine(params: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with stock_fleet() as one:
            chunks = await chunks_of(one.router, ask(**params))
            seed = params.get("seed", 4) if params.get("temperature") else None
            assert tokens_of(chunks) == output_of(PROMPT, 8, seed)
            assert finishes_of(chunks) == ["length"]
            assert (usage_of(chunks).prompt_tokens, usage_of(chunks).completion_tokens) == (5, 8)
            [asked], [decoded] = one.prefill[0].bodies, one.decode[0].bodies
            assert (asked["stream"], asked["sampling_params"]["max_tokens"]) == (False, 1)
            assert asked["kv_transfer_params"]["do_remote_decode"] is True
            assert decoded["kv_transfer_params"].keys() >= HANDLE
            assert (decoded["stream"], decoded["token_ids"], decoded["output_token_ids"]) == (True, PROMPT, [])
            assert one.decode[0].num_read == 1
            assert one.router.ledger.ended == {HoldState.PULLED: 1}
            assert not one.prefill[0].held
            await one.settle()

    run(scenario())


def test_the_first_token_is_prefills_and_does_not_wait_for_decode() -> None:
    async def scenario() -> None:
        async with stock_fleet() as one:
            one.decode[0].gate = asyncio.Event()
            async with aclosing(one.router.generate(ask())) as chunks:
                first = await anext(chunks)
                assert first.choices[0].token_ids == output_of(PROMPT, 1)
                one.decode[0].gate.set()
                rest = [chunk async for chunk in chunks]
            assert tokens_of([first, *rest]) == output_of(PROMPT, 8)

    run(scenario())


def test_a_prompt_goes_where_its_beginning_was_sent_before() -> None:
    """Without a word of theirs (KV events) stock engines are taken to have what they were sent."""
    beginning = [10 + place % 50 for place in range(100)]

    async def scenario() -> None:
        async with stock_fleet(3, 1) as one:
            await chunks_of(one.router, ask_of(beginning))
            first = next(engine for engine in one.prefill if engine.bodies)
            for number in range(6):
                await chunks_of(one.router, ask_of([*beginning, number]))
                await chunks_of(one.router, ask_of([100 + number] * 100))
            sent = [(engine, body["token_ids"]) for engine in one.prefill for body in engine.bodies]
            assert [engine for engine, token_ids in sent if token_ids[:100] == beginning] == [first] * 7
            assert all(engine.bodies for engine in one.prefill)
            await one.settle()

    run(scenario())


def ask_of(prompt: list[int]) -> GenerateRequest:
    return msgspec.structs.replace(ask(2), token_ids=prompt)


BAD = {name: {name: None} for name in HANDLE} | {
    "no groups": {"remote_block_ids": []},
    "empty groups": {"remote_block_ids": [[], []]},
    "a block that is none": {"remote_block_ids": [[-1]]},
    "a name that is empty": {"remote_host": ""},
    "a port that is none": {"remote_port": 0},
    "more tokens than there are": {"remote_num_tokens": 6},
    "another way": {"transfer_mode": "push"},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
def test_an_incomplete_handle_never_reaches_decode(change: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with stock_fleet() as one:
            one.prefill[0].answer = change
            assert tokens_of(await chunks_of(one.router, ask())) == output_of(PROMPT, 8)
            [decoded] = one.decode[0].bodies
            assert decoded["kv_transfer_params"] is None
            assert one.decode[0].dead is None
            assert one.count("no_transfer_total", cause="bad_ticket") == 1
            await one.settle()

    run(scenario())


def test_a_prefill_engine_without_the_connector_answers_nothing_and_decode_computes() -> None:
    async def scenario() -> None:
        async with stock_fleet() as one:
            one.prefill[0]._hold = lambda body, finish: None  # type: ignore[method-assign]
            assert tokens_of(await chunks_of(one.router, ask())) == output_of(PROMPT, 8)
            assert one.count("no_transfer_total", cause="no_ticket") == 1
            await one.settle()
            await one.end_leases()

    run(scenario())


def test_without_a_handoff_a_stock_engine_does_whole_requests() -> None:
    async def scenario() -> None:
        async with stock_fleet(handoff=None) as one:
            assert tokens_of(await chunks_of(one.router, ask())) == output_of(PROMPT, 8)
            assert one.prefill[0].bodies == []
            assert one.decode[0].bodies[0]["kv_transfer_params"] is None
            assert one.count("placements_total", reason="no_pair") == 1

    run(scenario())


def test_an_engine_with_another_model_gets_no_requests() -> None:
    def kind(name: str) -> StockVLLM:
        return StockVLLM(name, model="other" if name == "d0" else "m")

    async def scenario() -> None:
        async with stock_fleet(kind=kind) as one:
            assert tokens_of(await chunks_of(one.router, ask())) == output_of(PROMPT, 8)
            assert one.decode[0].bodies == []
            workers = {worker.role: worker for worker in one.router.fleet.workers.values()}
            assert workers["decode"].down == f"it has other, but {workers['prefill'].name} has m"

    run(scenario())


def test_no_request_is_longer_than_the_engines_can_take() -> None:
    async def scenario() -> None:
        async with stock_fleet() as one:
            failure = await failure_of(one, ask(124))
            assert (failure.status, failure.param) == (400, "sampling_params.max_tokens")
            assert one.prefill[0].bodies == []
            await chunks_of(one.router, ask(None))
            assert one.decode[0].bodies[0]["sampling_params"]["max_tokens"] == 123

    run(scenario())


def test_a_handle_is_used_once_when_its_decode_engine_dies_before_a_token() -> None:
    async def scenario() -> None:
        async with stock_fleet(num_decode=2) as one:
            first, second = one.decode
            first.refusals = [Response(status_code=502)]
            assert tokens_of(await chunks_of(one.router, ask())) == output_of(PROMPT, 8)
            assert first.bodies[0]["kv_transfer_params"] is not None
            assert second.bodies[0]["kv_transfer_params"] is None
            assert one.count("no_transfer_total", cause="used") == 1
            await one.settle()
            await one.end_leases()
            assert one.router.ledger.ended == {HoldState.EXPIRED: 1}

    run(scenario())


def test_a_handle_whose_lease_is_nearly_over_is_not_sent() -> None:
    async def scenario() -> None:
        async with stock_fleet() as one:
            async with aclosing(one.router.generate(ask())) as chunks:
                received = [await anext(chunks)]
                one.pass_time(26.0)
                received += [chunk async for chunk in chunks]
            await until(lambda: not one.prefill[0].held)
            assert tokens_of(received) == output_of(PROMPT, 8)
            assert one.decode[0].bodies[0]["kv_transfer_params"] is None
            assert one.count("no_transfer_total", cause="late") == 1

    run(scenario())


@pytest.mark.parametrize("num_read", [0, 1, 2, 5])
def test_a_client_that_leaves_leaves_nothing_at_work(num_read: int) -> None:
    async def scenario() -> None:
        async with stock_fleet() as one:
            if num_read == 0:
                one.prefill[0].gate = asyncio.Event()
                reader = asyncio.create_task(chunks_of(one.router, ask(60)))
                await until(lambda: one.prefill[0].num_open == 1)
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            else:
                chunks = one.router.generate(ask(60))
                for _ in range(num_read):
                    await anext(chunks)
                await chunks.aclose()
            await one.settle()
            await one.end_leases()
            assert one.router.ledger.num_leaked == 0
            if num_read == 0:
                await until(lambda: one.prefill[0].aborted == ["generate-tokens-ours-0"])
                one.prefill[0].gate = None
            assert tokens_of(await chunks_of(one.router, ask())) == output_of(PROMPT, 8)

    run(scenario())


def test_a_transfer_that_fails_costs_a_prefill_and_the_engine_stays_well() -> None:
    async def scenario() -> None:
        async with stock_fleet() as one:
            async with aclosing(one.router.generate(ask())) as chunks:
                received = [await anext(chunks)]
                one.prefill[0].dead = "killed"
                received += [chunk async for chunk in chunks]
            assert tokens_of(received) == output_of(PROMPT, 8)
            assert [body["kv_transfer_params"] is None for body in one.decode[0].bodies] == [False, True]
            assert one.count("transfer_failures_total", cause="load_failed") == 1
            assert [worker.down for worker in one.router.fleet.workers.values() if worker.role == "decode"] == [None]

    run(scenario())


def test_a_decode_engine_that_dies_in_the_middle_is_replaced_without_a_repeated_or_a_missing_token() -> None:
    async def scenario() -> None:
        async with stock_fleet(num_decode=2) as one:
            one.decode[0].dies_after = 4
            chunks = await chunks_of(one.router, ask(min_tokens=6))
            assert tokens_of(chunks) == output_of(PROMPT, 8)
            assert (usage_of(chunks).prompt_tokens, usage_of(chunks).completion_tokens) == (5, 8)
            rest = one.decode[1].bodies[0]
            assert rest["token_ids"] == PROMPT + output_of(PROMPT, 4)
            assert (rest["sampling_params"]["max_tokens"], rest["sampling_params"]["min_tokens"]) == (4, 2)

    run(scenario())


def test_what_depends_on_the_whole_output_is_made_again_elsewhere() -> None:
    async def scenario() -> None:
        async with stock_fleet(num_decode=2) as one:
            one.decode[0].dies_after = 4
            grammar = {"json_object": True}
            chunks = await chunks_of(one.router, ask(structured_outputs=grammar, temperature=0.7, seed=3))
            assert tokens_of(chunks) == output_of(PROMPT, 8, 3)
            assert one.decode[1].bodies[0]["token_ids"] == PROMPT

    run(scenario())


def test_two_engines_that_differ_where_they_may_cost_a_prefill_not_the_request() -> None:
    async def scenario() -> None:
        async with stock_fleet() as one:
            one.prefill[0].differs_at = 0
            tokens = tokens_of(await chunks_of(one.router, ask()))
            first = tokens[0]
            assert first != output_of(PROMPT, 1)[0]
            assert tokens[1:] == output_of([*PROMPT, first], 7)
            assert one.count("transfer_failures_total", cause="other") == 1
            await one.settle()

    run(scenario())


@pytest.mark.parametrize("has_decode", [True, False])
def test_what_is_held_for_a_request_that_its_first_token_ended_is_given_back(has_decode: bool) -> None:
    """By a decode engine that refuses it; without one it ends with its lease."""

    async def scenario() -> None:
        async with stock_fleet() as one:
            one.prefill[0].eos_at = 0
            one.prefill[0].gate = asyncio.Event()
            reader = asyncio.create_task(chunks_of(one.router, ask()))
            await until(lambda: one.prefill[0].num_open == 1)
            for worker in one.router.fleet.workers.values():
                worker.down = None if worker.role == "prefill" or has_decode else "killed"
            one.prefill[0].gate.set()
            chunks = await reader
            assert (tokens_of(chunks), finishes_of(chunks)) == ([EOS], ["stop"])
            assert one.decode[0].bodies == []
            if has_decode:
                await until(lambda: not one.router.ledger.owed)
                assert not one.prefill[0].held
            else:
                assert len(one.router.ledger.owed) == 1
                await one.end_leases()
            assert one.router.ledger.ended == {HoldState.RELEASED if has_decode else HoldState.EXPIRED: 1}
            assert one.router.ledger.num_leaked == 0
            assert one.decode[0].num_refused == has_decode

    run(scenario())


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "Bad Request"), (404, "NotFoundError"), (429, "TooManyRequests"), (503, "ServiceUnavailableError")],
)
def test_a_refusal_of_prefill_is_the_clients_with_its_status(status: int, kind: str) -> None:
    async def scenario() -> None:
        async with stock_fleet() as one:
            one.prefill[0].refusals = [error(status, "no", kind, {"Retry-After": "7"})]
            failure = await failure_of(one, ask())
            assert (failure.status, failure.message, failure.type) == (status, "no", kind)
            assert failure.retry_after_s == 7.0
            assert all(worker.down is None for worker in one.router.fleet.workers.values())
            await one.settle()
            await until(lambda: not one.router.ledger.owed)
            assert tokens_of(await chunks_of(one.router, ask())) == output_of(PROMPT, 8)

    run(scenario())


def test_many_at_once_keep_their_handles_apart() -> None:
    async def scenario() -> None:
        async with stock_fleet(2, 2) as one:
            requests = [msgspec.structs.replace(ask(), token_ids=[*PROMPT, index]) for index in range(12)]
            answers = await asyncio.gather(*(chunks_of(one.router, request) for request in requests))
            assert [tokens_of(answer) for answer in answers] == [output_of(one.token_ids, 8) for one in requests]
            assert sum(engine.num_read for engine in one.decode) == 12
            assert one.router.ledger.ended == {HoldState.PULLED: 12}
            await one.settle()

    run(scenario())


def test_a_decode_engine_that_is_busy_leaves_a_begun_stream_to_the_other() -> None:
    async def scenario() -> None:
        async with stock_fleet() as one:
            one.decode[0].refusals = [error(503, "queue is full", "ServiceUnavailableError")]
            assert tokens_of(await chunks_of(one.router, ask())) == output_of(PROMPT, 8)
            assert one.prefill[0].bodies[1]["token_ids"] == PROMPT + output_of(PROMPT, 1)
            assert all(worker.down is None for worker in one.router.fleet.workers.values())
            await one.settle()
            await one.end_leases()

    run(scenario())


def test_a_decode_engine_that_refuses_ends_the_stream_with_its_error() -> None:
    async def scenario() -> None:
        async with stock_fleet() as one:
            one.decode[0].refusals = [error(400, "no", "Bad Request")]
            failure = await failure_of(one, ask())
            assert (failure.status, failure.message) == (400, "no")
            assert all(worker.down is None for worker in one.router.fleet.workers.values())
            await one.settle()
            await one.end_leases()
            assert one.router.ledger.ended == {HoldState.EXPIRED: 1}

    run(scenario())


def test_a_prefill_engine_that_hangs_is_left_in_time_and_told_to_stop() -> None:
    async def scenario() -> None:
        async with stock_fleet(first_chunk_timeout_s=0.2) as one:
            one.prefill[0].gate = asyncio.Event()
            assert tokens_of(await chunks_of(one.router, ask())) == output_of(PROMPT, 8)
            assert one.decode[0].bodies[0]["kv_transfer_params"] is None
            await one.settle()
            await until(lambda: one.prefill[0].aborted == ["generate-tokens-ours-0"])

    run(scenario())


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_that_hangs_behind_a_server_that_is_well_loses_its_requests_to_others(side: str) -> None:
    async def scenario() -> None:
        async with stock_fleet(2, 2, stall_timeout_s=0.001, probe_timeout_s=0.05, dead_after_s=0.001) as one:
            first: StockVLLM = getattr(one, side)[0]
            first.gate = asyncio.Event()
            reader = asyncio.create_task(chunks_of(one.router, ask()))
            await until(lambda: first.num_open == 1)
            worker = next(worker for worker in one.router.fleet.workers.values() if worker.role == side)
            while not one.router.fleet.num_given_up:
                await one.router.fleet.look(worker)
            assert worker.down is not None and "not heard of" in worker.down
            assert tokens_of(await reader) == output_of(PROMPT, 8)
            first.gate.set()
            await one.settle()

    run(scenario())


@pytest.mark.parametrize(
    ("status", "is_down"), [(400, False), (404, False), (429, False), (503, False), (500, True), (502, True)]
)
def test_only_faults_take_an_engine_down(status: int, is_down: bool) -> None:
    async def scenario() -> None:
        async with stock_fleet(max_retries=0) as one:
            for _ in range(3):
                one.prefill[0].refusals = [error(status, "no", "Error")]
                if is_down:
                    for worker in one.router.fleet.workers.values():
                        worker.down = None
                await failure_of(one, ask())
            workers = {worker.role: worker for worker in one.router.fleet.workers.values()}
            assert (workers["prefill"].down is not None, workers["decode"].down) == (is_down, None)
            assert all(worker.in_flight == 0 for worker in workers.values())
            await until(lambda: not one.router.ledger.owed)

    run(scenario())
