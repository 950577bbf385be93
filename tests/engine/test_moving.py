"""Prefix tickets, migration and leases: KV that moves for other reasons than a first decode."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from engine.test_engine import CONNECTORS, EARLY, HOLD, answer, make_request, settled, tokens_in, tokens_of
from fakes.engines import toy_engine, toy_pair
from fourhop.engine.app import create
from fourhop.engine.config import EngineConfig
from fourhop.engine.sampled import Computed
from fourhop.engine.step import Work
from fourhop.engine.toy import ToyRunner, toy_output
from fourhop.kv.config import KVTransferConfig
from fourhop.kv.layout import KVPool
from fourhop.service import ServerConfig
from fourhop.wire.generate import GenerateChunk
from fourhop.wire.ticket import KVTicket
from fourhop.wire.worker import PrefixRequest

PROMPT = list(range(20, 43))
REPLY = toy_output(PROMPT, 6)
TURN_TWO = [*PROMPT, *REPLY, *range(60, 75)]


async def prefix_of(engine: Any, tokens: list[int], **fields: Any) -> dict[str, Any]:
    ticket = await engine.hold_prefix(PrefixRequest(tokens, **fields))
    assert isinstance(ticket, KVTicket)
    return msgspec.to_builtins(ticket)  # type: ignore[no-any-return]


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("early", [False, True])
def test_turn_two_pulls_what_decode_generated(connector: str, early: bool) -> None:
    """The blocks of prompt and reply come from decode; prefill computes the new tokens, with the same result."""

    async def main() -> None:
        async with toy_pair(connector) as pair:
            assert await tokens_of(pair.decode, make_request(PROMPT)) == REPLY
            prefix = await prefix_of(pair.decode, TURN_TWO)
            assert prefix["remote_num_tokens"] == 28, "whole blocks of the 28 tokens whose KV exists"
            hold = (EARLY if early else HOLD) | {"prefix": prefix}
            held = await answer(pair.prefill, make_request(TURN_TWO, kv_transfer_params=hold))
            assert held.choices[0].token_ids == toy_output(TURN_TWO, 1)
            assert held.usage is not None and held.usage.prompt_tokens_details is not None
            assert held.usage.prompt_tokens_details.cached_tokens == 28
            decoded = make_request(TURN_TWO, kv_transfer_params=held.kv_transfer_params)
            assert await tokens_of(pair.decode, decoded) == toy_output(TURN_TWO, 6)
            await settled(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_prompt_that_diverges_uses_only_what_is_common() -> None:
    """A template that drops the thinking of turn one: slower, never wrong."""
    diverging = [*PROMPT, *REPLY[:1], 99, *REPLY[1:]]

    async def main() -> None:
        async with toy_pair() as pair:
            await tokens_of(pair.decode, make_request(PROMPT))
            prefix = await prefix_of(pair.decode, diverging)
            assert prefix["remote_num_tokens"] == 24
            held = await answer(pair.prefill, make_request(diverging, kv_transfer_params=HOLD | {"prefix": prefix}))
            assert held.choices[0].token_ids == toy_output(diverging, 1)
            await pair.prefill.abort(["r"])
            await settled(pair.prefill, pair.decode)

    asyncio.run(main())


@pytest.mark.parametrize("field", ["token_hash", "epoch", "ticket_id", "fingerprint"])
def test_a_prefix_that_does_not_verify_costs_only_time(field: str) -> None:
    async def main() -> None:
        async with toy_pair("shm") as pair:
            await tokens_of(pair.decode, make_request(PROMPT))
            prefix = await prefix_of(pair.decode, TURN_TWO) | {field: "forged"}
            held = await answer(pair.prefill, make_request(TURN_TWO, kv_transfer_params=HOLD | {"prefix": prefix}))
            assert held.choices[0].token_ids == toy_output(TURN_TWO, 1)

    asyncio.run(main())


def test_nothing_cached_is_no_ticket() -> None:
    async def main() -> None:
        async with toy_pair() as pair:
            assert await pair.decode.hold_prefix(PrefixRequest(PROMPT)) is None
            await tokens_of(pair.decode, make_request(PROMPT))
            assert await pair.decode.hold_prefix(PrefixRequest(PROMPT, cache_salt="another tenant")) is None

    asyncio.run(main())


async def some(chunks: AsyncIterator[GenerateChunk], count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += tokens_in(await anext(chunks))
    return tokens


def gated(gate: threading.Event) -> Callable[[KVPool], ToyRunner]:
    """A runner that stops before a sequence's tenth token until the gate opens."""

    class Gated(ToyRunner):
        def run(self, work: list[Work]) -> Computed:
            if any(item.sequence.num_output == 9 for item in work):
                assert gate.wait(10)
            return super().run(work)

    return Gated


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_running_request_moves_with_its_kv(connector: str) -> None:
    async def main() -> None:
        gate = threading.Event()
        async with toy_pair(connector, runner=gated(gate)) as pair:
            async with aclosing(pair.prefill.generate(make_request(PROMPT, 40))) as chunks:
                before = await some(chunks, 5)
                migration = asyncio.create_task(pair.prefill.migrate(["r"]))
                await asyncio.sleep(0)
                gate.set()
                assert await migration == 1
                rest = [chunk async for chunk in chunks]
            before += [token for chunk in rest for token in tokens_in(chunk)]
            (end,) = [chunk for chunk in rest if any(choice.finish_reason for choice in chunk.choices)]
            assert end.choices[0].finish_reason == "migrated"
            moved = make_request(PROMPT, 40, output_token_ids=before, kv_transfer_params=end.kv_transfer_params)
            assert before + await tokens_of(pair.decode, moved) == toy_output(PROMPT, 40)
            assert pair.decode.loop.jobs.counters.transfers == 1
            await settled(pair.prefill, pair.decode)

    asyncio.run(main())


def test_what_has_not_begun_moves_without_kv() -> None:
    config = EngineConfig(block_size=4, max_num_seqs=1)

    async def main() -> None:
        async with toy_pair(config=config) as pair:
            running = asyncio.create_task(tokens_of(pair.prefill, make_request([11], 200)))
            waiting = asyncio.create_task(answer(pair.prefill, make_request([12], request_id="w")))
            await asyncio.sleep(0)
            while not pair.prefill.info().num_waiting:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert await pair.prefill.migrate(["w"]) == 1
            ended = await waiting
            assert (ended.choices[0].finish_reason, ended.kv_transfer_params) == ("migrated", None)
            await running

    asyncio.run(main())


def test_leases_over_http() -> None:
    config = msgspec.convert(
        {"kv_connector": "shm", "kv_connector_extra_config": {"kv_lease_duration": 500.0}}, KVTransferConfig
    )

    async def main() -> None:
        async with toy_engine(transfer=config) as engine:
            held = await answer(engine, make_request([11], request_id="mine", kv_transfer_params=HOLD))
            assert held.kv_transfer_params is not None
            ticket_id = held.kv_transfer_params["ticket_id"]
            await asyncio.to_thread(over_http, engine, ticket_id)
            await settled(engine)

    def over_http(engine: Any, ticket_id: str) -> None:
        client = TestClient(create(engine, ServerConfig()))
        (lease,) = client.get("/kv/leases").json()["leases"]
        assert (lease["ticket_id"], lease["request_id"], lease["num_blocks"]) == (ticket_id, "mine", 1)
        renewed = client.post("/kv/renew", json={"ticket_ids": [ticket_id, "unknown"]})
        assert [ticket["ticket_id"] for ticket in renewed.json()["tickets"]] == [ticket_id]
        assert client.post("/kv/prefix", json={"token_ids": [1, 2]}).json() == {"kv_transfer_params": None}
        assert client.post("/kv/prefix", json={"token_ids": [-1]}).status_code == 400
        assert client.post("/inference/v1/migrate", json={"request_ids": ["x"]}).json() == {"num_migrated": 0}
        assert client.post("/inference/v1/abort_requests", json={"request_ids": [ticket_id]}).status_code == 200

    asyncio.run(main())
