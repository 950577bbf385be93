"""One request over two engines: where it goes, what the client sees, and that every way out leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import aclosing

import msgspec
import pytest

from contracts.token_server import chunks_of, finishes_of, tokens_of, until, usage_of
from fakes.fleet import Bench, bench
from fakes.stub_engine import EOS, Fault, StubEngine, next_token
from fourhop.router.ledger import HoldState
from fourhop.wire.errors import (
    ClientError,
    ErrorBody,
    FourhopError,
    PeerError,
    PeerRefused,
    PeerTimeout,
    TransferError,
    Unavailable,
)
from fourhop.wire.generate import GenerateChunk, GenerateRequest, SamplingParams

PROMPT = [1, 2, 3, 4, 5]
BROKEN = PeerError("the connection broke")
BUSY = PeerRefused(503, ErrorBody("queue is full", "ServiceUnavailableError", None, 503), retry_after_s=7)


def ask(max_tokens: int | None = 8, **params: object) -> GenerateRequest:
    settings = {"max_tokens": max_tokens, "seed": 11} | params
    return GenerateRequest(token_ids=PROMPT, sampling_params=msgspec.convert(settings, SamplingParams), request_id="r")


def expected(request: GenerateRequest, num_tokens: int) -> list[int]:
    """What one engine alone would say."""
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(next_token(request, output))
    return output


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


async def failure_of(one: Bench, request: GenerateRequest) -> tuple[list[int], FourhopError]:
    """The tokens that arrived, and the error that ended the stream."""
    received: list[GenerateChunk] = []
    async with aclosing(one.router.generate(request)) as chunks:
        try:
            async for chunk in chunks:
                received.append(chunk)
        except FourhopError as error:
            return tokens_of(received), error
    raise AssertionError("the stream ended well")


def test_prefill_and_decode_run_on_different_engines_and_make_the_same_tokens() -> None:
    async def scenario() -> None:
        async with bench() as one:
            request = ask()
            chunks = await chunks_of(one.router, request)
            assert tokens_of(chunks) == expected(request, 8)
            assert finishes_of(chunks) == ["length"]
            assert (usage_of(chunks).prompt_tokens, usage_of(chunks).completion_tokens) == (5, 8)
            [prefill_leg], [decode_leg] = one.prefill[0].requests, one.decode[0].requests
            assert prefill_leg.sampling_params.max_tokens == 1
            assert prefill_leg.kv_transfer_params == {"do_remote_decode": True, "early_ticket": True}
            assert decode_leg.output_token_ids == []
            assert decode_leg.kv_transfer_params is not None
            assert decode_leg.kv_transfer_params["do_remote_prefill"] is True
            assert prefill_leg.sampling_params.seed == decode_leg.sampling_params.seed == 11
            assert one.decode[0].num_pulled == 1
            assert one.router.ledger.ended == {HoldState.PULLED: 1}
            await one.settle()

    run(scenario())


def test_decode_is_reserved_before_prefill_has_computed_anything() -> None:
    async def scenario() -> None:
        async with bench() as one:
            one.prefill[0].gate = asyncio.Event()
            reader = asyncio.create_task(chunks_of(one.router, ask()))
            await until(lambda: one.decode[0].num_open == 1)
            assert one.router.fleet.workers["http://d0"].in_flight == 1
            one.prefill[0].gate.set()
            assert tokens_of(await reader) == expected(ask(), 8)
            await one.settle()

    run(scenario())


def test_the_first_token_is_prefills_and_does_not_wait_for_decode() -> None:
    async def scenario() -> None:
        async with bench() as one:
            one.decode[0].gate = asyncio.Event()
            async with aclosing(one.router.generate(ask())) as chunks:
                first = await anext(chunks)
                assert first.choices[0].token_ids == expected(ask(), 1)
                assert first.choices[0].finish_reason is None
                assert first.kv_transfer_params is None
                one.decode[0].gate.set()
                rest = [chunk async for chunk in chunks]
            assert tokens_of([first, *rest]) == expected(ask(), 8)

    run(scenario())


def test_without_an_early_ticket_decode_is_asked_when_prefill_has_ended() -> None:
    """The serial form: the decode engine is given the first token and makes only later ones."""

    async def scenario() -> None:
        async with bench() as one:
            one.prefill[0].gives_early_tickets = False
            async with aclosing(one.router.generate(ask())) as chunks:
                received = [await anext(chunks)]
                assert one.decode[0].requests == []
                received += [chunk async for chunk in chunks]
            assert tokens_of(received) == expected(ask(), 8)
            assert one.decode[0].requests[0].output_token_ids == expected(ask(), 1)
            assert one.decode[0].num_pulled == 1
            assert one.router.ledger.ended == {HoldState.PULLED: 1}
            await one.settle()

    run(scenario())


@pytest.mark.parametrize("logprobs", [None, 1])
def test_engines_that_disagree_end_the_request_and_their_tokens_are_not_mixed(
    logprobs: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with bench(2, 2) as one:
            for engine in one.decode:
                engine.repeats_as = 3
            tokens, error = await failure_of(one, ask(logprobs=logprobs))
            assert tokens == expected(ask(), 1)
            assert (error.status, error.type) == (502, "EnginesDisagreeError")
            assert one.count("fourhop_router_disagreements_total") == 1
            assert all(worker.down is None for worker in one.router.fleet.workers.values())
            await one.settle()

    run(scenario())
    assert [record.levelname for record in caplog.records if "made the tokens" in record.message] == ["ERROR"]


def test_a_prefill_engine_that_dies_after_its_token_does_not_stop_a_decode_engine_that_goes_on() -> None:
    async def scenario() -> None:
        async with bench(2, 2) as one:
            one.prefill[0].faults = [Fault(1, BROKEN)]
            assert tokens_of(await chunks_of(one.router, ask())) == expected(ask(), 8)
            assert [len(engine.requests) for engine in one.engines] == [1, 0, 1, 0]
            await one.settle()

    run(scenario())


def test_moments_of_both_hops_are_told_in_order() -> None:
    async def scenario() -> None:
        async with bench() as one:
            chunks = await chunks_of(one.router, ask())
            assert chunks[0].moments is not None
            assert set(chunks[0].moments) == {"received", "admitted", "placed", "prefill_started", "prefill_done"}
            told = chunks[-2].moments
            assert told is not None and chunks[-1].moments == told
            assert {"kv_requested", "kv_ready", "last_token"} <= set(told)
            assert all(chunk.moments is None for chunk in chunks[1:-2])

    run(scenario())


@pytest.mark.parametrize("ignored", [False, True])
def test_eos_as_first_token_ends_without_a_hand_over(ignored: bool) -> None:
    """Case 61."""

    async def scenario() -> None:
        async with bench() as one:
            for engine in one.engines:
                engine.eos_at = 0
            chunks = await chunks_of(one.router, ask(ignore_eos=ignored))
            assert tokens_of(chunks)[0] == EOS
            assert finishes_of(chunks) == (["length"] if ignored else ["stop"])
            assert len(tokens_of(chunks)) == (8 if ignored else 1)
            assert one.decode[0].num_pulled == (1 if ignored else 0)
            await one.settle()

    run(scenario())


def test_min_tokens_reach_the_prefill_leg() -> None:
    """Case 61: the first token must not be EOS where more tokens are demanded."""

    async def scenario() -> None:
        async with bench() as one:
            for engine in one.engines:
                engine.eos_at = 0
            chunks = await chunks_of(one.router, ask(min_tokens=3))
            assert len(tokens_of(chunks)) == 8
            assert one.prefill[0].requests[0].sampling_params.min_tokens == 3
            await one.settle()

    run(scenario())


def test_one_token_is_made_where_the_prompt_is_without_a_hold() -> None:
    async def scenario() -> None:
        async with bench() as one:
            chunks = await chunks_of(one.router, ask(max_tokens=1))
            assert tokens_of(chunks) == expected(ask(), 1)
            assert one.prefill[0].requests[0].kv_transfer_params is None
            assert one.decode[0].requests == []
            assert one.count("fourhop_router_placements_total", reason="one_token") == 1

    run(scenario())


def test_legs_have_fresh_ids_so_that_equal_client_ids_do_not_meet() -> None:
    """Case 71."""

    async def scenario() -> None:
        async with bench() as one:
            answers = await asyncio.gather(*(chunks_of(one.router, ask(seed=seed)) for seed in (1, 2)))
            assert [tokens_of(chunks) for chunks in answers] == [expected(ask(seed=seed), 8) for seed in (1, 2)]
            ids = [request.request_id for engine in one.engines for request in engine.requests]
            assert len(set(ids)) == 4 and "r" not in ids
            assert {chunk.request_id for chunks in answers for chunk in chunks} == {"r"}

    run(scenario())


def test_a_missing_seed_is_drawn_once_for_both_legs() -> None:
    async def scenario() -> None:
        async with bench() as one:
            await chunks_of(one.router, ask(seed=None))
            assert [engine.requests[0].sampling_params.seed for engine in one.engines] == [4, 4]

    run(scenario())


def test_transfer_parameters_of_a_client_are_refused() -> None:
    async def scenario() -> None:
        async with bench() as one:
            for params in ({"do_remote_decode": True}, {"do_remote_prefill": True, "remote_host": "10.0.0.1"}, {}):
                with pytest.raises(ClientError) as refused:
                    await chunks_of(one.router, msgspec.structs.replace(ask(), kv_transfer_params=params))
                assert refused.value.param == "kv_transfer_params"
            assert all(engine.requests == [] for engine in one.engines)

    run(scenario())


@pytest.mark.parametrize(("num_prefill", "num_decode", "reason"), [(2, 0, "no_decode"), (0, 2, "no_prefill")])
def test_one_side_alone_serves_the_whole_and_says_so(
    num_prefill: int, num_decode: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="fourhop.request")

    async def scenario() -> None:
        async with bench(num_prefill, num_decode) as one:
            chunks = await chunks_of(one.router, ask())
            assert tokens_of(chunks) == expected(ask(), 8)
            assert one.count("fourhop_router_placements_total", reason=reason) == 1
            assert f"reason={reason}" in caplog.text

    run(scenario())


def test_engines_that_cannot_exchange_are_not_paired() -> None:
    async def scenario() -> None:
        async with bench(2, 2) as one:
            one.prefill[0].fingerprint = one.decode[0].fingerprint = "weights-2"
            await one.look()
            for seed in range(6):
                await chunks_of(one.router, ask(seed=seed))
            assert len(one.prefill[0].requests) == len(one.decode[0].requests)
            assert [engine.num_pulled for engine in one.decode] == [len(one.prefill[0].requests), 3]
            one.prefill[0].fingerprint = one.prefill[1].fingerprint = "weights-3"
            await one.look()
            assert tokens_of(await chunks_of(one.router, ask())) == expected(ask(), 8)
            assert one.count("fourhop_router_placements_total", reason="no_pair") == 1
            await one.settle()

    run(scenario())


def test_engines_without_worker_info_are_served_whole() -> None:
    """A stock vLLM has no `/worker`."""

    async def scenario() -> None:
        async with bench() as one:
            for engine in one.engines:
                engine.has_info = False
            await one.look()
            assert tokens_of(await chunks_of(one.router, ask())) == expected(ask(), 8)
            assert one.count("fourhop_router_placements_total", reason="no_pair") == 1

    run(scenario())


def test_load_spreads_over_all_engines() -> None:
    async def scenario() -> None:
        async with bench(2, 3) as one:
            await asyncio.gather(*(chunks_of(one.router, ask(seed=seed)) for seed in range(12)))
            assert [len(engine.requests) for engine in one.prefill] == [6, 6]
            assert [len(engine.requests) for engine in one.decode] == [4, 4, 4]
            await one.settle()

    run(scenario())


# Engines that fail.


@pytest.mark.parametrize("error", [BROKEN, PeerTimeout("silent"), BUSY])
def test_a_prefill_engine_that_fails_before_its_token_is_replaced(error: FourhopError) -> None:
    async def scenario() -> None:
        async with bench(2, 1) as one:
            one.prefill[0].faults = [Fault(0, error)]
            chunks = await chunks_of(one.router, ask())
            assert tokens_of(chunks) == expected(ask(), 8)
            assert [len(engine.requests) for engine in one.prefill] == [1, 1]
            assert one.decode[0].num_pulled == 1
            await one.settle()

    run(scenario())


@pytest.mark.parametrize("num_sent", range(-1, 9))
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_that_dies_at_any_token_is_replaced_without_a_lost_or_repeated_token(
    side: str, num_sent: int
) -> None:
    async def scenario() -> None:
        async with bench(2, 2) as one:
            dying: StubEngine = getattr(one, side)[0]
            dying.faults = [Fault(num_sent, BROKEN)]
            request = ask()
            chunks = await chunks_of(one.router, request)
            assert tokens_of(chunks) == expected(request, 8)
            assert finishes_of(chunks) == ["length"]
            assert usage_of(chunks).completion_tokens == 8
            assert sum(chunk.usage is not None for chunk in chunks) == 1
            await one.settle()

    run(scenario())


@pytest.mark.parametrize("num_sent", [-1, 0, 1, 3, 6])
def test_the_only_decode_engine_dies_and_the_prefill_engine_goes_on(num_sent: int) -> None:
    async def scenario() -> None:
        async with bench() as one:
            one.decode[0].faults = [Fault(num_sent, BROKEN)]
            chunks = await chunks_of(one.router, ask())
            assert tokens_of(chunks) == expected(ask(), 8)
            assert one.prefill[0].requests[-1].output_token_ids == expected(ask(), max(1, num_sent))
            assert one.prefill[0].requests[-1].kv_transfer_params is None
            await one.settle()

    run(scenario())


def test_a_transfer_that_fails_is_computed_again_on_the_same_engine() -> None:
    async def scenario() -> None:
        async with bench() as one:
            one.decode[0].faults = [None]
            async with aclosing(one.router.generate(ask())) as chunks:
                received = [await anext(chunks)]
                one.prefill[0].die()
                received += [chunk async for chunk in chunks]
            assert tokens_of(received) == expected(ask(), 8)
            assert [leg.kv_transfer_params is None for leg in one.decode[0].requests] == [False, True]
            assert one.count("fourhop_router_no_transfer_total", cause="failed") == 1
            one.prefill[0].restart()
            one.clock.now_s += 60
            await one.look()
            await one.settle()

    run(scenario())


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_num_tokens": 99},
        {"token_hash": "0"},
        {"fingerprint": "other"},
        {"expires_at_s": 1.0},
        {"remote_port": "x"},
        {"surprise": 1},
        {"do_remote_prefill": False},
    ],
)
def test_a_ticket_that_is_not_right_never_reaches_decode(changes: dict[str, object]) -> None:
    async def scenario() -> None:
        async with bench() as one:
            one.prefill[0].ticket_changes = changes
            assert tokens_of(await chunks_of(one.router, ask())) == expected(ask(), 8)
            assert one.decode[0].requests[0].kv_transfer_params is None
            told = [
                one.count("fourhop_router_fallbacks_total", cause=cause) for cause in ("early_ticket", "kv_bad_ticket")
            ]
            assert told == [1, 1]
            await one.settle()
            assert one.router.ledger.ended == {HoldState.RELEASED: 1}

    run(scenario())


@pytest.mark.parametrize("sides", [(2, 1), (1, 1), (0, 2)])
@pytest.mark.parametrize("after", [0, 1])
def test_a_transfer_of_its_own_that_fails_an_engine_is_a_reason_to_ask_another(
    sides: tuple[int, int], after: int
) -> None:
    """It was given no ticket by us: what failed is between it and others, as with a router behind a router."""

    async def scenario() -> None:
        async with bench(*sides) as one:
            first = (one.prefill or one.decode)[0]
            first.faults = [Fault(after, TransferError("timeout", "slow"))]
            assert tokens_of(await chunks_of(one.router, ask())) == expected(ask(), 8)
            assert one.router.fleet.workers[first.name].down is None
            await one.settle()

    run(scenario())


def test_a_busy_decode_engine_passes_the_ticket_on() -> None:
    async def scenario() -> None:
        async with bench(1, 2) as one:
            one.decode[0].refusal = BUSY
            assert tokens_of(await chunks_of(one.router, ask())) == expected(ask(), 8)
            assert one.decode[1].num_pulled == 1
            assert all(worker.down is None for worker in one.router.fleet.workers.values())
            await one.settle()

    run(scenario())


def test_back_pressure_of_all_prefill_engines_is_the_answer() -> None:
    """Cases 73 and 80: it is not moved to the decode engines, and Retry-After is kept."""

    async def scenario() -> None:
        async with bench(2, 1) as one:
            for engine in one.prefill:
                engine.faults = [Fault(-1, BUSY)]
            tokens, error = await failure_of(one, ask())
            assert (tokens, error.status, error.retry_after_s) == ([], 503, 7)
            assert one.decode[0].requests == []
            await one.settle()
            assert tokens_of(await chunks_of(one.router, ask())) == expected(ask(), 8)

    run(scenario())


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_request_that_an_engine_calls_wrong_is_not_tried_again(side: str) -> None:
    """Cases 73 and 80."""

    async def scenario() -> None:
        async with bench(2, 2) as one:
            wrong = PeerRefused(400, ErrorBody("too long", "BadRequestError", "token_ids", 400))
            for engine in getattr(one, side):
                engine.faults = [Fault(0, wrong)]
            tokens, error = await failure_of(one, ask())
            assert (error.status, error.param, len(tokens)) == (400, "token_ids", int(side == "decode"))
            assert sum(len(engine.requests) for engine in getattr(one, side)) == 1
            await one.settle()

    run(scenario())


def test_retries_are_bounded() -> None:
    async def scenario() -> None:
        async with bench(6, 1) as one:
            for engine in one.prefill:
                engine.faults = [Fault(0, BROKEN)]
            tokens, error = await failure_of(one, ask())
            assert (tokens, error.status) == ([], 502)
            assert sum(len(engine.requests) for engine in one.prefill) == 3
            await one.settle()

    run(scenario())


def test_a_stream_that_no_engine_can_go_on_with_ends_with_the_error() -> None:
    async def scenario() -> None:
        async with bench() as one:
            one.decode[0].faults = [Fault(2, BROKEN)]
            one.prefill[0].faults = [None, Fault(0, PeerTimeout("silent"))]
            tokens, error = await failure_of(one, ask())
            assert tokens == expected(ask(), 2)
            assert error.status == 504
            await one.settle()

    run(scenario())


def test_nothing_alive_is_a_503_that_says_what_is_down_and_recovers() -> None:
    async def scenario() -> None:
        async with bench() as one:
            for engine in one.engines:
                engine.die()
            await one.look()
            with pytest.raises(Unavailable, match=r"http://p0.*cannot connect.*http://d0.*cannot connect") as refused:
                await chunks_of(one.router, ask())
            assert refused.value.retry_after_s is not None
            assert one.router.health() is not None
            for engine in one.engines:
                engine.restart()
            one.clock.now_s += 60
            await one.look()
            assert tokens_of(await chunks_of(one.router, ask())) == expected(ask(), 8)
            await one.settle()

    run(scenario())


# Clients that leave, and what is held.


@pytest.mark.parametrize("num_turns", range(40))
def test_a_client_that_leaves_at_any_moment_leaves_nothing_behind(num_turns: int) -> None:
    """Case 79: cancelled after each number of turns of the event loop, so in every window."""

    async def scenario() -> None:
        async with bench() as one:
            reader = asyncio.create_task(chunks_of(one.router, ask()))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await one.settle()
            assert tokens_of(await chunks_of(one.router, ask())) == expected(ask(), 8)

    run(scenario())


def test_a_client_that_leaves_between_the_legs_frees_the_ticket() -> None:
    async def scenario() -> None:
        async with bench() as one:
            chunks = one.router.generate(ask())
            await anext(chunks)
            [(ticket, leg_id)] = one.prefill[0].holds.items()
            await chunks.aclose()
            await one.settle()
            assert one.prefill[0].aborted == [ticket, leg_id]
            assert one.router.ledger.ended == {HoldState.RELEASED: 1}

    run(scenario())


def test_a_client_that_leaves_during_prefill_frees_a_hold_whose_ticket_was_never_seen() -> None:
    async def scenario() -> None:
        async with bench() as one:
            one.prefill[0].faults = [Fault(-1, None)]
            reader = asyncio.create_task(chunks_of(one.router, ask()))
            await until(lambda: one.prefill[0].num_open == 1)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await one.settle()
            assert one.prefill[0].aborted == [one.prefill[0].requests[0].request_id]

    run(scenario())


def test_a_release_that_fails_is_a_leak_until_the_engine_is_back() -> None:
    async def scenario() -> None:
        async with bench() as one:
            one.prefill[0].abort_error = PeerError("no answer")
            chunks = one.router.generate(ask())
            await anext(chunks)
            await chunks.aclose()
            await until(lambda: one.router.ledger.num_leaked == 1)
            assert one.count("fourhop_router_leaked_holds") == 1
            one.prefill[0].abort_error = None
            one.prefill[0].ill = PeerError("down")
            await one.look()
            one.prefill[0].ill = None
            one.clock.now_s += 10
            await one.look()
            await one.settle()
            assert one.router.ledger.num_leaked == 0

    run(scenario())


def test_a_release_that_failed_is_tried_again_at_an_engine_that_is_well() -> None:
    """Found by a storm: the call was cut off, the engine never went down, so it never came up either."""

    async def scenario() -> None:
        async with bench() as one:
            one.prefill[0].abort_error = PeerError("cut off")
            chunks = one.router.generate(ask())
            await anext(chunks)
            await chunks.aclose()
            await until(lambda: one.router.ledger.num_leaked == 1)
            one.prefill[0].abort_error = None
            one.router.releaser.retry_leaks()
            await one.settle()
            assert one.router.ledger.num_leaked == 0

    run(scenario())


def test_abort_by_the_clients_id_ends_the_stream_with_abort() -> None:
    async def scenario() -> None:
        async with bench() as one, aclosing(one.router.generate(ask(max_tokens=100))) as chunks:
            received = [await anext(chunks), await anext(chunks)]
            await one.router.abort(["someone-else"])
            await one.router.abort(["r"])
            received += [chunk async for chunk in chunks]
            assert finishes_of(received) == ["abort"]
            assert len(tokens_of(received)) < 100

    run(scenario())


def test_an_engine_that_cannot_be_told_of_an_abort_keeps_no_other_from_it() -> None:
    async def scenario() -> None:
        async with bench(0, 2) as one:
            for engine in one.decode:
                engine.gate = asyncio.Event()
            reader = asyncio.create_task(chunks_of(one.router, ask(n=2)))
            await until(lambda: all(engine.num_open == 1 for engine in one.decode))
            one.decode[0].abort_error = PeerError("no answer")
            with pytest.raises(PeerError, match="no answer"):
                await one.router.abort(["r"])
            assert len(one.decode[1].aborted) == 1
            for engine in one.decode:
                assert engine.gate is not None
                engine.gate.set()
            await reader
            await one.settle()

    run(scenario())


def test_after_every_kind_of_end_all_counters_are_back() -> None:
    """Case 85: success, failure, refusal, retry and abort in one run, twice over."""

    async def scenario() -> None:
        async with bench(2, 2, max_retries=1) as one:
            for _ in range(2):
                one.prefill[0].faults = [None, Fault(0, BROKEN), None, Fault(0, BUSY)]
                one.decode[1].faults = [Fault(1, BROKEN), None, Fault(0, TransferError("timeout", "slow"))]
                readers = [asyncio.create_task(chunks_of(one.router, ask(seed=seed))) for seed in range(20)]
                for turn in range(20):
                    await asyncio.sleep(0)
                    if turn % 4 == 3:
                        readers[turn].cancel()
                await asyncio.gather(*readers, return_exceptions=True)
                one.clock.now_s += 60
                await one.look()
                await one.settle()
            assert one.count("fourhop_router_in_flight", engine="http://p0", role="prefill") == 0
            assert one.count("fourhop_router_owed_holds") == 0
            assert one.count("fourhop_router_leaked_holds") == 0

    run(scenario())


def test_every_request_leaves_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fourhop.request")

    async def scenario() -> None:
        async with bench() as one:
            await chunks_of(one.router, ask(n=2))
            chunks = one.router.generate(ask())
            await anext(chunks)
            await chunks.aclose()
            with pytest.raises(ClientError):
                await chunks_of(one.router, ask(max_tokens=0))

    run(scenario())
    lines = [record.getMessage() for record in caplog.records if record.name == "fourhop.request"]
    assert len(lines) == 3
    for word in (
        "request_id=r",
        "outcome=finished",
        "finish=length",
        "reason=split",
        "prefill=http://p0",
        "decode=http://d0",
        "prompt_tokens=5",
        "completion_tokens=16",
        "placed_ms=",
        "kv_ready_ms=",
        "last_token_ms=",
    ):
        assert word in lines[0]
    assert "outcome=cancelled" in lines[1] and "completion_tokens=1" in lines[1]
    assert "outcome=refused" in lines[2] and "status=400" in lines[2]
