"""Joins an engine's parts, whatever the model: scheduler, loop, connector and the `TokenServer` before them."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fourhop.engine.blocks import BlockPool
from fourhop.engine.config import EngineConfig
from fourhop.engine.ledger import HoldLedger, Identity
from fourhop.engine.loop import EngineLoop, ModelRunner
from fourhop.engine.scheduler import Limits as StepLimits
from fourhop.engine.scheduler import Scheduler
from fourhop.engine.server import ROLES, Engine
from fourhop.kv.config import KVTransferConfig
from fourhop.kv.connector import Connector, Notify
from fourhop.kv.connectors import open_connector
from fourhop.kv.layout import BlockLayout, KVPool
from fourhop.tokens.limits import Limits
from fourhop.wire.worker import WorkerInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """What the engine above the runner needs to know of a model."""

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


@contextlib.asynccontextmanager
async def run_engine(
    config: EngineConfig,
    model: Model,
    runner: ModelRunner,
    pool: KVPool,
    *,
    transfer: KVTransferConfig | None = None,
    connect: Callable[[KVTransferConfig, KVPool, str, Notify], Connector] = open_connector,
) -> AsyncIterator[Engine]:
    """An engine of the given parts, running until the context is left."""
    identity = Identity(
        engine_id=(transfer.engine_id if transfer is not None else "") or f"engine-{secrets.token_hex(4)}",
        epoch=secrets.token_hex(8),
        fingerprint=model.fingerprint,
    )
    loop = EngineLoop(
        runner,
        Scheduler(BlockPool(pool.layout.num_blocks), _step_limits(config, model, pool.layout)),
        clock=time.monotonic,
        recompute=transfer is not None and transfer.kv_load_failure_policy == "recompute",
    )
    ledger = None
    if transfer is not None:
        connector = connect(transfer, pool, identity.epoch, loop.notify)
        lease_s = transfer.kv_connector_extra_config.kv_lease_duration
        ledger = HoldLedger(connector, identity, lease_s=lease_s, wall_clock=time.time)
    info = WorkerInfo(
        engine_id=identity.engine_id,
        epoch=identity.epoch,
        model=model.name,
        role=ROLES[transfer.kv_role] if transfer is not None else "both",
        fingerprint=identity.fingerprint,
        connector=ledger.connector_name if ledger is not None else None,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        block_size=pool.layout.block_size,
        num_blocks=pool.layout.num_blocks,
        num_free_blocks=pool.layout.num_blocks,
        num_held_blocks=0,
        num_running=0,
        num_waiting=0,
    )
    limits = Limits(model.vocab_size, model.max_model_len, config.max_num_seqs, config.max_logprobs)
    loop.start(ledger)
    log.info(
        "engine ready: engine=%s model=%s window=%d blocks=%d block_size=%d connector=%s",
        info.engine_id,
        info.model,
        info.max_model_len,
        info.num_blocks,
        info.block_size,
        info.connector,
    )
    try:
        yield Engine(loop, info, limits, model.eos_token_ids, transfer, config.stall_timeout_s)
    finally:
        loop.stop()
        if ledger is not None:
            ledger.close()


def _step_limits(config: EngineConfig, model: Model, layout: BlockLayout) -> StepLimits:
    return StepLimits(
        block_size=layout.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=model.max_model_len,
        prefix_caching=config.enable_prefix_caching,
    )
