"""The real connectors over real sockets that fail: every request has its tokens or a named error, and nothing stays."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any, Literal

import msgspec
import pytest

from engine.test_engine import EARLY, HOLD, answer, make_request, settled
from fakes.engines import VOCAB_SIZE
from faults.proxy import faulty_proxy
from fourhop.engine.assembly import Model, run_engine
from fourhop.engine.config import EngineConfig
from fourhop.engine.server import Engine
from fourhop.engine.toy import ToyRunner, toy_layout, toy_output
from fourhop.kv.config import ConnectorOptions, KVTransferConfig
from fourhop.kv.connector import Connector, Event, Notify, Progress
from fourhop.kv.connectors import open_connector
from fourhop.kv.layout import KVPool
from fourhop.wire.errors import TransferError
from fourhop.wire.ticket import KVTicket

NUM_BLOCKS = 48
NUM_REQUESTS = 8
OPTIONS = ConnectorOptions(pull_timeout_s=0.4, kv_lease_duration=0.8, checksum=True)
CONFIG = EngineConfig(block_size=4, max_num_batched_tokens=8)


class Rerouted:
    """A connector whose tickets lead to `port` instead of its own."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self.name = connector.name
        self.own_port = 0
        self.port = 0

    def publish(self, ticket: KVTicket, progress: Progress) -> KVTicket:
        ticket = self._connector.publish(ticket, progress)
        self.own_port = ticket.port
        return msgspec.structs.replace(ticket, port=self.port or ticket.port)

    def pull(self, ticket: KVTicket, block_ids: list[int], names: list[bytes], skip_blocks: int = 0) -> None:
        self._connector.pull(ticket, block_ids, names, skip_blocks)

    def release(self, ticket_id: str) -> None:
        self._connector.release(ticket_id)

    def renew(self, ticket: KVTicket) -> None:
        self._connector.renew(ticket)

    def poll(self) -> list[Event]:
        return self._connector.poll()

    def close(self) -> None:
        self._connector.close()


async def open_engine(stack: AsyncExitStack, transfer: KVTransferConfig) -> tuple[Engine, Rerouted]:
    pool = KVPool(toy_layout(NUM_BLOCKS, CONFIG.block_size))
    stack.callback(pool.close)
    opened: list[Rerouted] = []

    def connect(config: KVTransferConfig, pool: KVPool, epoch: str, notify: Notify) -> Connector:
        opened.append(Rerouted(open_connector(config, pool, epoch, notify)))
        return opened[0]

    model = Model("toy", "toy", VOCAB_SIZE, NUM_BLOCKS * CONFIG.block_size, frozenset())
    running = run_engine(CONFIG, model, ToyRunner(pool), pool, transfer=transfer, connect=connect)
    return await stack.enter_async_context(running), opened[0]


async def hand_over(rng: random.Random, prefill: Engine, decode: Engine, name: str) -> list[int] | None:
    """The tokens of a request over two engines; None if the hand-over failed."""
    prompt = [rng.randrange(10, 107) for _ in range(rng.randrange(1, 60))]
    request = make_request(prompt, 8, request_id=name)
    hold = rng.choice((HOLD, EARLY))
    chunks = prefill.generate(msgspec.structs.replace(request, kv_transfer_params=hold))
    ticket: dict[str, Any] | None = None
    rest: asyncio.Future[list[Any]] = asyncio.ensure_future(asyncio.sleep(0, []))
    async for chunk in chunks:
        ticket = chunk.kv_transfer_params or ticket
        if ticket is not None:
            rest = asyncio.ensure_future(drain(chunks))
            break
    try:
        answered = await answer(decode, msgspec.structs.replace(request, kv_transfer_params=ticket))
        tokens = answered.choices[0].token_ids
        assert tokens == toy_output(prompt, 8), f"{name}: {tokens}"
        return tokens
    except TransferError:
        return None
    finally:
        await rest


async def drain(chunks: Any) -> list[Any]:
    return [chunk async for chunk in chunks]


@pytest.mark.parametrize("connector", ["shm", "tcp"])
@pytest.mark.parametrize("seed", range(12))
def test_a_proxy_between_two_engines(connector: str, seed: int) -> None:
    policy: Literal["fail", "recompute"] = "fail" if seed % 2 else "recompute"
    transfer = KVTransferConfig(connector, "kv_both", policy, "", OPTIONS)

    async def main() -> None:
        rng = random.Random(seed)
        async with AsyncExitStack() as stack:
            prefill, producer = await open_engine(stack, transfer)
            decode, _ = await open_engine(stack, transfer)
            assert await hand_over(rng, prefill, decode, "first") is not None
            producer.port = await stack.enter_async_context(faulty_proxy(rng, producer.own_port, longest=1500))
            names = [f"r{number}" for number in range(NUM_REQUESTS)]
            ends = await asyncio.gather(*(hand_over(rng, prefill, decode, name) for name in names))
            assert policy == "fail" or None not in ends
            await settled(prefill, decode)
            producer.port = 0
            assert await hand_over(rng, prefill, decode, "last") is not None
            await settled(prefill, decode)

    asyncio.run(main())
