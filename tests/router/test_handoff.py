"""Each hand-over protocol of a stock vLLM: what the legs are told, what of an answer is believed, what is left over."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from contracts.token_server import chunks_of, finishes_of, tokens_of, until
from fakes.serving import serving
from fakes.stock_connectors import MooncakeVLLM, MoRIIOVLLM, PushVLLM, StoreVLLM
from fakes.stock_fleet import StockFleet, stock_fleet
from fakes.stock_vllm import EOS, output_of
from fourhop.router.config import RouterConfig
from fourhop.router.handoff.kinds import STOCK
from fourhop.router.handoff.protocol import Answer, Endpoint, Question
from fourhop.router.ledger import HoldState
from fourhop.wire.errors import StartError, TransferError
from fourhop.wire.generate import GenerateRequest, SamplingParams

PROMPT = [10, 11, 12, 13, 14]
PREFILL = Endpoint(host="10.0.0.1", engine_id="engine-p")
DECODE = Endpoint(host="10.0.0.2", init_port=7300, alloc_port=7400)
QUESTION = Question("t-1", PREFILL, DECODE, None, now_s=100.0)


def ask(max_tokens: int = 8, **params: Any) -> GenerateRequest:
    settings = {"max_tokens": max_tokens, "temperature": 0.0} | params
    return GenerateRequest(token_ids=PROMPT, sampling_params=msgspec.convert(settings, SamplingParams), request_id="r")


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


async def is_split_right(one: StockFleet) -> None:
    """A split request makes the tokens of one engine, its KV is used once, and nothing is left."""
    assert tokens_of(await chunks_of(one.router, ask())) == output_of(PROMPT, 8)
    assert [len(engine.bodies) for engine in (*one.prefill, *one.decode)] == [1, 1]
    assert one.decode[0].num_read == 1
    assert one.prefill[0].dead is None and one.decode[0].dead is None
    assert not one.prefill[0].held
    await one.settle()
    assert not one.router.ledger.owed


def test_nixl_push_has_one_id_on_both_legs() -> None:
    async def scenario() -> None:
        async with stock_fleet(kind=PushVLLM, handoff="nixl_push") as one:
            await is_split_right(one)
            assert one.prefill[0].ids == one.decode[0].ids == ["ours-0"]
            assert one.router.ledger.ended == {HoldState.PULLED: 1}

    run(scenario())


def test_engines_that_push_are_not_taken_for_engines_that_pull() -> None:
    async def scenario() -> None:
        async with stock_fleet(kind=PushVLLM, handoff="nixl") as one:
            assert tokens_of(await chunks_of(one.router, ask())) == output_of(PROMPT, 8)
            assert one.decode[0].bodies[0]["kv_transfer_params"] is None
            assert one.count("no_transfer_total", cause="bad_ticket") == 1

    run(scenario())


async def mooncake(check: Any) -> None:
    kinds = {name: MooncakeVLLM(name) for name in ("p0", "d0")}
    async with serving(kinds["p0"].bootstrap_app()) as url:
        kinds["p0"].bootstrap = url
        endpoints = {"p0": Endpoint(bootstrap_port=int(url.rpartition(":")[2]))}
        async with stock_fleet(kind=kinds.__getitem__, handoff="mooncake", endpoints=endpoints) as one:
            await check(one)


def test_mooncake_has_both_legs_at_work_at_once() -> None:
    async def check(one: StockFleet) -> None:
        one.prefill[0].gate = asyncio.Event()
        reader = asyncio.create_task(chunks_of(one.router, ask()))
        await until(lambda: one.decode[0].num_open == 1 and one.prefill[0].num_open == 1)
        one.prefill[0].gate.set()
        assert tokens_of(await reader) == output_of(PROMPT, 8)
        [asked], [decoded] = one.prefill[0].bodies, one.decode[0].bodies
        assert asked["kv_transfer_params"]["transfer_id"] == decoded["kv_transfer_params"]["transfer_id"]
        assert decoded["kv_transfer_params"]["remote_engine_id"] == "p0"
        assert one.decode[0].num_read == 1
        await one.settle()
        assert one.router.ledger.ended == {HoldState.PULLED: 1}

    run(mooncake(check))


def test_mooncake_calls_decode_off_when_the_first_token_ends_the_request() -> None:
    async def check(one: StockFleet) -> None:
        one.prefill[0].eos_at = 0
        chunks = await chunks_of(one.router, ask())
        assert (tokens_of(chunks), finishes_of(chunks)) == ([EOS], ["stop"])
        await one.settle()
        assert not one.router.ledger.owed

    run(mooncake(check))


def test_mooncake_calls_decode_off_when_the_client_leaves() -> None:
    async def check(one: StockFleet) -> None:
        one.prefill[0].gate = asyncio.Event()
        reader = asyncio.create_task(chunks_of(one.router, ask()))
        await until(lambda: one.decode[0].num_open == 1 and one.prefill[0].num_open == 1)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await one.settle()

    run(mooncake(check))


def test_mooncake_decode_that_differs_costs_a_prefill() -> None:
    async def check(one: StockFleet) -> None:
        one.prefill[0].differs_at = 0
        tokens = tokens_of(await chunks_of(one.router, ask()))
        assert tokens[1:] == output_of([*PROMPT, tokens[0]], 7)
        await one.settle()

    run(mooncake(check))


def test_a_mooncake_engine_whose_name_is_not_known_is_down() -> None:
    async def scenario() -> None:
        async with stock_fleet(
            kind=MooncakeVLLM, handoff="mooncake", endpoints={"p0": Endpoint(bootstrap_port=9)}
        ) as one:
            reason = [worker.down for worker in one.router.fleet.workers.values() if worker.role == "prefill"]
            assert reason[0] is not None and "127.0.0.1:9" in reason[0]
            assert tokens_of(await chunks_of(one.router, ask())) == output_of(PROMPT, 8)

    run(scenario())


def test_moriio_is_given_an_id_and_where_decode_listens() -> None:
    async def scenario() -> None:
        async with stock_fleet(kind=MoRIIOVLLM, handoff="moriio") as one:
            await is_split_right(one)
            asked = one.prefill[0].bodies[0]["kv_transfer_params"]
            assert (asked["remote_host"], asked["remote_notify_port"]) == ("127.0.0.1", 61005)

    run(scenario())


@pytest.mark.parametrize("handoff", ["store", "lmcache"])
def test_a_store_is_filled_before_decode_is_asked(handoff: str) -> None:
    stores: dict[str, set[tuple[int, ...]]] = {"p0": set(), "d0": set()}
    if handoff == "store":
        stores["d0"] = stores["p0"]

    def kind(name: str) -> StoreVLLM:
        return StoreVLLM(name, store=stores[name], receiver=7300 if name == "d0" else None)

    async def scenario() -> None:
        async with stock_fleet(kind=kind, handoff=handoff, endpoints={"d0": DECODE}) as one:
            await is_split_right(one)
            assert one.decode[0].bodies[0]["kv_transfer_params"] is None
            assert one.router.ledger.ended == {HoldState.NEVER_HELD: 1}

    run(scenario())


def test_lmcache_writes_to_the_engine_that_decodes() -> None:
    ports = {"d0": 7300, "d1": 7301}

    def kind(name: str) -> StoreVLLM:
        return StoreVLLM(name, receiver=ports.get(name))

    endpoints = {name: Endpoint(init_port=port, alloc_port=port + 100) for name, port in ports.items()}

    async def scenario() -> None:
        async with stock_fleet(1, 2, kind=kind, handoff="lmcache", endpoints=endpoints) as one:
            requests = [msgspec.structs.replace(ask(), token_ids=[*PROMPT, index]) for index in range(6)]
            answers = await asyncio.gather(*(chunks_of(one.router, request) for request in requests))
            assert [tokens_of(answer) for answer in answers] == [output_of(one.token_ids, 8) for one in requests]
            assert sum(engine.num_read for engine in one.decode) == 6

    run(scenario())


@pytest.mark.parametrize("num_read", [1, 3])
@pytest.mark.parametrize(("handoff", "kind"), [("nixl_push", PushVLLM), ("moriio", MoRIIOVLLM), ("store", StoreVLLM)])
def test_a_client_that_leaves_leaves_nothing_at_work(handoff: str, kind: Any, num_read: int) -> None:
    async def scenario() -> None:
        async with stock_fleet(kind=kind, handoff=handoff) as one:
            async with aclosing(one.router.generate(ask(60))) as chunks:
                for _ in range(num_read):
                    await anext(chunks)
            await one.settle()
            await one.end_leases()
            assert one.router.ledger.num_leaked == 0

    run(scenario())


def test_what_is_asked() -> None:
    asked = {name: handoff.ask(QUESTION) for name, handoff in STOCK.items()}
    assert asked["mooncake"] == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t-1"}
    assert asked["store"] is None
    assert asked["lmcache"] == {
        "disagg_spec": {
            "req_id": "t-1",
            "receiver_host": "10.0.0.2",
            "receiver_init_port": [7300],
            "receiver_alloc_port": [7400],
        }
    }
    assert asked["moriio"] is not None and asked["moriio"]["transfer_id"] == "t-1"
    assert asked["nixl"] == asked["nixl_push"]
    at_once = STOCK["mooncake"].at_once(QUESTION)
    assert at_once is not None
    assert at_once.params["remote_bootstrap_addr"] == "http://10.0.0.1:8998"
    assert [name for name, handoff in STOCK.items() if handoff.at_once(QUESTION)] == ["mooncake"]


GOOD: dict[str, dict[str, Any]] = {
    "nixl": {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "e",
        "remote_request_id": "r-01234567",
        "remote_host": "h",
        "remote_port": 5600,
        "remote_block_ids": [[1, 2]],
        "tp_size": 1,
    },
    "moriio": {
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_host": "h",
        "remote_handshake_port": 1,
        "remote_notify_port": 2,
        "remote_block_ids": [[1]],
        "tp_size": 1,
        "transfer_id": "t",
    },
}


@pytest.mark.parametrize("name", GOOD)
def test_an_answer_is_passed_on_as_it_is_or_not_at_all(name: str) -> None:
    handoff = STOCK[name]  # type: ignore[index]
    whole = GOOD[name] | {"a_field_of_a_later_version": {"x": 1}}
    handle = handoff.take(Answer(whole, PROMPT, 5, None, now_s=100.0))
    assert handle.params == whole
    assert handle.send_by_s is not None and 100.0 < handle.send_by_s < handle.expires_at_s
    for field in GOOD[name]:
        if field == "do_remote_decode":
            continue
        for wrong in ({k: v for k, v in whole.items() if k != field}, whole | {field: None}, whole | {field: {}}):
            with pytest.raises(TransferError) as failure:
                handoff.take(Answer(wrong, PROMPT, 5, None, now_s=100.0))
            assert failure.value.cause == "incomplete"


def test_an_endpoint_of_no_engine_is_refused() -> None:
    with pytest.raises(StartError, match="http://x:1"):
        RouterConfig(("http://p:1",), ("http://d:1",), handoff_endpoints={"http://x:1": Endpoint()})
