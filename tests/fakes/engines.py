"""Real engines over the toy model: everything but the weights."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fourhop.engine.assembly import Model, run_engine
from fourhop.engine.config import EngineConfig
from fourhop.engine.server import Engine
from fourhop.engine.toy import ToyRunner, toy_layout
from fourhop.kv.config import KVEventsConfig, KVTransferConfig
from fourhop.kv.connector import Connector, Notify
from fourhop.kv.connectors import open_connector
from fourhop.kv.layout import KVPool
from fourhop.kv.local import LocalConnector, LocalNetwork

EOS = 7
VOCAB_SIZE = 200
TOY_CONFIG = EngineConfig(block_size=4)


def connect_local(network: LocalNetwork) -> Callable[[KVTransferConfig, KVPool, str, Notify], Connector]:
    """The `local` connector of one network, as `run_engine` wants it."""

    def connect(config: KVTransferConfig, pool: KVPool, epoch: str, notify: Notify) -> Connector:
        return LocalConnector(network, config.kv_connector_extra_config, pool, epoch, notify)

    return connect


@dataclass(frozen=True)
class ToyPair:
    """A prefill and a decode engine."""

    prefill: Engine
    decode: Engine


@contextlib.asynccontextmanager
async def toy_engine(
    *,
    num_blocks: int = 64,
    config: EngineConfig = TOY_CONFIG,
    transfer: KVTransferConfig | None = None,
    events: KVEventsConfig | None = None,
    network: LocalNetwork | None = None,
    runner: Callable[[KVPool], ToyRunner] = ToyRunner,
    eos_token_ids: frozenset[int] = frozenset({EOS}),
    fingerprint: str = "toy",
) -> AsyncIterator[Engine]:
    """One engine; with `transfer` it can hand over, within `network` if its connector is `local`."""
    pool = KVPool(toy_layout(num_blocks, config.block_size))
    window = num_blocks * config.block_size
    model = Model("toy", fingerprint, VOCAB_SIZE, window, eos_token_ids)
    connect = open_connector if network is None else connect_local(network)
    try:
        async with run_engine(
            config, model, runner(pool), pool, transfer=transfer, events=events, connect=connect
        ) as engine:
            yield engine
    finally:
        pool.close()


@contextlib.asynccontextmanager
async def toy_pair(connector: str = "local", **options: object) -> AsyncIterator[ToyPair]:
    """Two engines that hand over through `connector`; `options` go to both."""
    network = LocalNetwork() if connector == "local" else None
    transfer = KVTransferConfig(kv_connector=connector)
    async with (
        toy_engine(transfer=transfer, network=network, **options) as prefill,  # type: ignore[arg-type]
        toy_engine(transfer=transfer, network=network, **options) as decode,  # type: ignore[arg-type]
    ):
        yield ToyPair(prefill, decode)
