"""A whole engine over the toy model: its tokens, its hand-overs, its aborts. Every token proves the KV it came from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from contracts.token_server import CHECKS, Check, Subject, run_check
from fakes.engines import ToyPair, toy_engine, toy_pair
from fourhop.engine.config import EngineConfig
from fourhop.engine.server import Engine
from fourhop.engine.toy import ToyRunner, toy_output
from fourhop.kv.config import KVTransferConfig
from fourhop.tokens.server import TokenServer, collect
from fourhop.wire.errors import ClientError, TransferError
from fourhop.wire.generate import GenerateChunk, GenerateRequest, GenerateResponse, SamplingParams

CONNECTORS = ("local", "shm", "tcp")
HOLD = {"do_remote_decode": True}
EARLY = {"do_remote_decode": True, "early_ticket": True}


def make_request(prompt: list[int], max_tokens: int = 6, **fields: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields.pop("params", {}))
    return GenerateRequest(request_id=fields.pop("request_id", "r"), token_ids=prompt, sampling_params=params, **fields)


async def answer(server: TokenServer, request: GenerateRequest) -> GenerateResponse:
    return await collect(server.generate(request), model=None, created=0)


async def tokens_of(server: TokenServer, request: GenerateRequest) -> list[int]:
    return (await answer(server, request)).choices[0].token_ids


async def settled(*engines: Engine) -> None:
    """Wait until nothing runs, loads or is held, and every block is free."""
    async with asyncio.timeout(10):
        for engine in engines:
            while engine.info().num_free_blocks < engine.info().num_blocks or engine.info().num_waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def split(pair: ToyPair, request: GenerateRequest) -> list[int]:
    """The guide's flow: prefill with one token, then decode with what prefill returned."""
    one = msgspec.structs.replace(request.sampling_params, max_tokens=1)
    prefill = await answer(pair.prefill, msgspec.structs.replace(request, sampling_params=one, kv_transfer_params=HOLD))
    assert prefill.kv_transfer_params is not None
    return await tokens_of(pair.decode, msgspec.structs.replace(request, kv_transfer_params=prefill.kv_transfer_params))


def test_the_engine_answers_what_the_model_says() -> None:
    async def main() -> None:
        async with toy_engine() as engine:
            response = await answer(engine, make_request([11, 12, 13]))
            assert response.choices[0].token_ids == toy_output([11, 12, 13], 6)
            assert response.choices[0].finish_reason == "length"
            assert response.usage is not None
            assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (3, 6)

    asyncio.run(main())


@pytest.mark.parametrize("stop", [[], [197]])
def test_the_models_own_ends_stay_beside_the_clients(stop: list[int]) -> None:
    """Case 55: each of two EOS ids ends the output, whatever stop ids the client sends."""
    whole = toy_output([11, 12, 13], 12)
    first, second = whole[3], whole[6]
    assert first != second and {first, second}.isdisjoint(whole[:3])

    async def main() -> None:
        for ends, num_tokens in ({first, 198}, 4), ({198, second}, 1 + whole.index(second)):
            async with toy_engine(eos_token_ids=frozenset(ends)) as engine:
                response = await answer(engine, make_request([11, 12, 13], 12, params={"stop_token_ids": stop}))
                choice = response.choices[0]
                assert (choice.token_ids, choice.finish_reason) == (whole[:num_tokens], "stop")
                assert choice.stop_reason is None

    asyncio.run(main())


@pytest.mark.parametrize("num_blocks", [64, 12])
@pytest.mark.parametrize("caching", [True, False])
def test_neighbours_and_preemption_change_nothing(num_blocks: int, caching: bool) -> None:
    config = EngineConfig(block_size=4, max_num_batched_tokens=16, enable_prefix_caching=caching)
    prompts = [[11 + index] * (1 + 3 * index) for index in range(8)]

    async def main() -> None:
        async with toy_engine(num_blocks=num_blocks, config=config) as engine:
            answers = await asyncio.gather(*(tokens_of(engine, make_request(prompt, 20)) for prompt in prompts))
            assert list(answers) == [toy_output(prompt, 20) for prompt in prompts]
            assert (engine.loop.scheduler.num_preemptions > 0) == (num_blocks == 12)
            await settled(engine)

    asyncio.run(main())


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_hand_over_changes_nothing(connector: str) -> None:
    """Prompts around block edges, one by one and all at once, over every connector."""
    prompts = [[20 + length] * length for length in (1, 3, 4, 5, 8, 15, 16, 17)]

    async def main() -> None:
        async with toy_pair(connector) as pair:
            for prompt in prompts:
                assert await split(pair, make_request(prompt)) == toy_output(prompt, 6)
            fresh = [[50 + length] * length for length in (1, 3, 4, 5, 8, 15, 16, 17)]
            answers = await asyncio.gather(*(split(pair, make_request(prompt)) for prompt in fresh))
            assert list(answers) == [toy_output(prompt, 6) for prompt in fresh]
            await settled(pair.prefill, pair.decode)

    asyncio.run(main())


@pytest.mark.parametrize("connector", CONNECTORS)
def test_decode_pulls_only_what_it_lacks(connector: str) -> None:
    prompt = list(range(20, 37))

    async def main() -> None:
        async with toy_pair(connector) as pair:
            await tokens_of(pair.decode, make_request(prompt[:9]))
            assert await split(pair, make_request(prompt)) == toy_output(prompt, 6)
            block_bytes = 2 * 4 * 8
            assert pair.decode.loop.jobs.counters.transfer_bytes == 3 * block_bytes

    asyncio.run(main())


def test_the_router_form_sends_only_later_tokens() -> None:
    async def main() -> None:
        prompt = [11, 12, 13]
        async with toy_pair() as pair:
            held = await answer(pair.prefill, make_request(prompt, kv_transfer_params=HOLD))
            first = held.choices[0].token_ids
            rest = await answer(
                pair.decode,
                make_request(prompt, output_token_ids=first, kv_transfer_params=held.kv_transfer_params),
            )
            assert first + rest.choices[0].token_ids == toy_output(prompt, 6)
            assert rest.usage is not None and rest.usage.completion_tokens == 6

    asyncio.run(main())


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("length", [1, 4, 5, 16, 17, 60])
def test_an_early_ticket_hands_over_while_the_prompt_is_computed(connector: str, length: int) -> None:
    """Decode is asked before prefill has a token; it answers the first one too, which travels with the last block."""
    prompt = [20 + length] * length
    config = EngineConfig(block_size=4, max_num_batched_tokens=8)

    async def main() -> None:
        async with toy_pair(connector, config=config) as pair:
            async with aclosing(pair.prefill.generate(make_request(prompt, kv_transfer_params=EARLY))) as chunks:
                ticket = (await anext(chunks)).kv_transfer_params
                decode = asyncio.create_task(tokens_of(pair.decode, make_request(prompt, kv_transfer_params=ticket)))
                first = [token for chunk in [chunk async for chunk in chunks] for token in tokens_in(chunk)]
            assert await decode == toy_output(prompt, 6)
            assert first == toy_output(prompt, 1)
            await settled(pair.prefill, pair.decode)

    asyncio.run(main())


def tokens_in(chunk: GenerateChunk) -> list[int]:
    return [token for choice in chunk.choices for token in choice.token_ids]


@pytest.mark.parametrize("leaves", ["decode", "prefill"])
def test_either_side_may_leave_before_the_prompt_is_computed(leaves: str) -> None:
    prompt = list(range(20, 80))
    config = EngineConfig(block_size=4, max_num_batched_tokens=4)

    async def main() -> None:
        async with toy_pair("shm", config=config) as pair:
            prefill = pair.prefill.generate(make_request(prompt, kv_transfer_params=EARLY))
            ticket = (await anext(prefill)).kv_transfer_params
            decode = asyncio.create_task(tokens_of(pair.decode, make_request(prompt, kv_transfer_params=ticket)))
            if leaves == "prefill":
                await prefill.aclose()
                with pytest.raises(TransferError, match=r"withdrawn|unknown_ticket"):
                    await decode
            else:
                await asyncio.sleep(0)
                decode.cancel()
                rest = [chunk async for chunk in prefill]
                assert [token for chunk in rest for token in tokens_in(chunk)] == toy_output(prompt, 1)
                await pair.prefill.abort(["r"])
            await settled(pair.prefill, pair.decode)

    asyncio.run(main())


def test_eos_as_first_token_ends_an_early_hand_over() -> None:
    prompt = list(range(20, 50))

    async def main() -> None:
        (first,) = toy_output(prompt, 1)
        async with toy_pair("shm", eos_token_ids=frozenset({first})) as pair:
            prefill = pair.prefill.generate(make_request(prompt, kv_transfer_params=EARLY))
            ticket = (await anext(prefill)).kv_transfer_params
            decode = asyncio.create_task(answer(pair.decode, make_request(prompt, kv_transfer_params=ticket)))
            ends = [choice.finish_reason for chunk in [chunk async for chunk in prefill] for choice in chunk.choices]
            assert ends == ["stop"]
            with pytest.raises(TransferError, match=r"withdrawn|unknown_ticket"):
                await decode
            await settled(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_ticket_works_once() -> None:
    async def main() -> None:
        async with toy_pair() as pair:
            held = await answer(pair.prefill, make_request([11, 12], kv_transfer_params=HOLD))
            again = make_request([11, 12], kv_transfer_params=held.kv_transfer_params)
            assert await tokens_of(pair.decode, again) == toy_output([11, 12], 6)
            with pytest.raises(TransferError, match=r"used|unknown_ticket"):
                await answer(pair.decode, again)
            await settled(pair.prefill, pair.decode)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("field", "value", "cause"),
    [
        ("fingerprint", "other", "fingerprint"),
        ("token_hash", "0" * 64, "token_hash"),
        ("remote_num_tokens", 99, "token_count"),
        ("expires_at_s", 0.0, "expired"),
        ("epoch", "another boot", "epoch"),
        ("ticket_id", "made up", "unknown_ticket"),
        ("remote_port", 9, "unreachable"),
        ("connector", "tcp", "connector"),
        ("remote_block_ids", [[0, 1, 2, 3]], "token_count"),
    ],
)
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_ticket_that_does_not_verify(field: str, value: object, cause: str, policy: str) -> None:
    """It is refused by name, or recomputed; never decoded from. And the next request is served."""

    async def main() -> None:
        transfer = KVTransferConfig(kv_connector="shm", kv_load_failure_policy=policy)  # type: ignore[arg-type]
        async with toy_engine(transfer=transfer) as prefill, toy_engine(transfer=transfer) as decode:
            held = await answer(prefill, make_request([11, 12], kv_transfer_params=HOLD))
            assert held.kv_transfer_params is not None
            forged = make_request([11, 12], kv_transfer_params=held.kv_transfer_params | {field: value})
            if policy == "fail":
                with pytest.raises(TransferError) as caught:
                    await answer(decode, forged)
                assert caught.value.cause == cause
            else:
                assert await tokens_of(decode, forged) == toy_output([11, 12], 6)
            good = make_request([11, 12], kv_transfer_params=held.kv_transfer_params)
            assert await tokens_of(decode, good) == toy_output([11, 12], 6)
            assert decode.loop.jobs.counters.transfer_failures == {cause: 1}
            await settled(prefill, decode)

    asyncio.run(main())


@pytest.mark.parametrize("connector", CONNECTORS)
def test_of_many_requests_with_one_ticket_one_gets_it(connector: str) -> None:
    async def main() -> None:
        async with toy_pair(connector) as pair:
            held = await answer(pair.prefill, make_request([11, 12], kv_transfer_params=HOLD))
            same = make_request([11, 12], kv_transfer_params=held.kv_transfer_params)
            ends = await asyncio.gather(*(tokens_of(pair.decode, same) for _ in range(4)), return_exceptions=True)
            assert [end for end in ends if isinstance(end, list)] == [toy_output([11, 12], 6)]
            assert [end.cause for end in ends if isinstance(end, TransferError)] == ["used"] * 3
            await settled(pair.prefill, pair.decode)

    asyncio.run(main())


def test_another_prompt_with_somebodys_ticket_is_refused() -> None:
    async def main() -> None:
        async with toy_pair() as pair:
            held = await answer(pair.prefill, make_request([11, 12], kv_transfer_params=HOLD))
            with pytest.raises(TransferError, match="token_hash"):
                await answer(pair.decode, make_request([11, 13], kv_transfer_params=held.kv_transfer_params))

    asyncio.run(main())


def test_a_lease_that_nobody_pulls_ends_by_itself() -> None:
    async def main() -> None:
        extra: dict[str, Any] = {"kv_lease_duration": 0.05}
        config = msgspec.convert({"kv_connector": "shm", "kv_connector_extra_config": extra}, KVTransferConfig)
        async with toy_engine(transfer=config) as engine:
            await answer(engine, make_request([11, 12], kv_transfer_params=HOLD))
            await settled(engine)
            assert engine.loop.transfers is not None and engine.loop.transfers.ledger.num_expired == 1

    asyncio.run(main())


@pytest.mark.parametrize("by", ["request id", "ticket id"])
def test_a_hold_is_let_go_by_name(by: str) -> None:
    async def main() -> None:
        async with toy_pair() as pair:
            held = await answer(pair.prefill, make_request([11], request_id="mine", kv_transfer_params=HOLD))
            assert held.kv_transfer_params is not None
            await pair.prefill.abort(["mine" if by == "request id" else held.kv_transfer_params["ticket_id"]])
            await settled(pair.prefill)
            with pytest.raises(TransferError):
                await answer(pair.decode, make_request([11], kv_transfer_params=held.kv_transfer_params))
            await settled(pair.decode)

    asyncio.run(main())


def test_eos_as_first_token_holds_nothing() -> None:
    async def main() -> None:
        (first,) = toy_output([11], 1)
        async with toy_engine(transfer=KVTransferConfig("shm"), eos_token_ids=frozenset({first})) as engine:
            held = await answer(engine, make_request([11], kv_transfer_params=HOLD))
            assert (held.choices[0].finish_reason, held.kv_transfer_params) == ("stop", None)
            await settled(engine)

    asyncio.run(main())


@pytest.mark.parametrize("limit", [1, 2])
def test_limits_count_the_token_that_prefill_made(limit: int) -> None:
    async def main() -> None:
        async with toy_pair() as pair:
            assert await split(pair, make_request([11, 12], limit)) == toy_output([11, 12], limit)
            await settled(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_client_that_leaves_frees_its_blocks() -> None:
    async def main() -> None:
        async with toy_engine() as engine:
            async with aclosing(engine.generate(make_request([11], 100))) as chunks:
                async for _ in chunks:
                    break
            await settled(engine)

    asyncio.run(main())


class FailingRunner(ToyRunner):
    def run(self, work: Any) -> Any:
        raise RuntimeError("the accelerator fell off the bus")


def test_a_loop_that_fails_says_so_and_hangs_nobody() -> None:
    from fourhop.wire.errors import EngineError, Unavailable

    async def main() -> None:
        async with toy_engine(runner=FailingRunner) as engine:
            with pytest.raises(EngineError, match="failed while it computed"):
                await answer(engine, make_request([11]))
            assert engine.health() == "the engine loop failed: RuntimeError"
            with pytest.raises(Unavailable):
                await answer(engine, make_request([11]))

    asyncio.run(main())


def test_choices_differ_and_repeat() -> None:
    async def main() -> None:
        async with toy_engine() as engine:
            request = make_request([11], params={"n": 2})
            response = await answer(engine, request)
            assert [choice.index for choice in response.choices] == [0, 1]
            assert response.usage is not None and response.usage.completion_tokens == 12

    asyncio.run(main())


def test_without_a_connector_a_hold_is_refused() -> None:
    async def main() -> None:
        async with toy_engine() as engine:
            with pytest.raises(ClientError, match="no KV connector"):
                await answer(engine, make_request([11], kv_transfer_params=HOLD))
            assert await tokens_of(engine, make_request([11])) == toy_output([11], 6)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def open_subject() -> AsyncIterator[Subject]:
    async with toy_engine() as engine:
        yield Subject(engine, [11, 12, 13], lambda: engine.info().num_free_blocks == engine.info().num_blocks)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check) -> None:
    asyncio.run(run_check(check, open_subject))
