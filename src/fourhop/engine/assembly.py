"""Joins an engine's parts, whatever the model: scheduler, loop, connector and the `TokenServer` before them."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fourhop.engine.blocks import BlockPool
from fourhop.engine.cachelog import CacheLog
from fourhop.engine.config import EngineConfig
from fourhop.engine.grammar import Grammars
from fourhop.engine.jobs import Jobs
from fourhop.engine.ledger import HoldLedger, Identity
from fourhop.engine.loop import EngineLoop, ModelRunner
from fourhop.engine.pulls import PullBook
from fourhop.engine.scheduler import Scheduler
from fourhop.engine.server import ROLES, Engine
from fourhop.engine.step import Limits as StepLimits
from fourhop.engine.transfers import RENEW_EVERY_S, Transfers
from fourhop.kv.config import KVEventsConfig, KVTransferConfig
from fourhop.kv.connector import Connector, Notify
from fourhop.kv.connectors import open_connector
from fourhop.kv.layout import BlockLayout, KVPool
from fourhop.tokens.limits import Limits
from fourhop.wire.errors import StartError
from fourhop.wire.worker import WorkerInfo

if TYPE_CHECKING:
    from fourhop.engine.publisher import EventPublisher

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """What the engine above the runner needs to know of a model."""

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True)
class Surroundings:
    """What an engine takes from its process: the time, and how its loop is driven. Production uses the defaults."""

    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    loop: type[EngineLoop] = EngineLoop


PROCESS = Surroundings()

PROMPT_LOGITS_BYTES = 64 << 20
"""Memory for the logits of one step's prompt tokens whose log-probabilities are asked for, as float32."""


@contextlib.asynccontextmanager
async def run_engine(
    config: EngineConfig,
    model: Model,
    runner: ModelRunner,
    pool: KVPool,
    *,
    transfer: KVTransferConfig | None = None,
    events: KVEventsConfig | None = None,
    grammars: Grammars | None = None,
    connect: Callable[[KVTransferConfig, KVPool, str, Notify], Connector] = open_connector,
    surroundings: Surroundings = PROCESS,
) -> AsyncIterator[Engine]:
    """An engine of the given parts, running until the context is left. Without `grammars` it enforces none."""
    identity = Identity(
        engine_id=(transfer.engine_id if transfer is not None else "") or f"engine-{secrets.token_hex(4)}",
        epoch=secrets.token_hex(8),
        fingerprint=model.fingerprint,
    )
    publisher = _publisher(events, surroundings.wall_clock)
    cache_log = None if publisher is None else CacheLog(pool.layout.block_size)
    blocks = BlockPool(pool.layout.num_blocks, None if cache_log is None else cache_log.removed)
    scheduler = Scheduler(blocks, _step_limits(config, model, pool.layout), cache_log)
    loop = surroundings.loop(runner, scheduler, Jobs(surroundings.clock))
    transfers = None
    if transfer is not None:
        connector = connect(transfer, pool, identity.epoch, loop.notify)
        ledger = _ledger(transfer, connector, identity, pool.layout, surroundings.wall_clock)
        transfers = Transfers(
            connector,
            ledger,
            PullBook(connector, block_size=pool.layout.block_size, renew_every_s=RENEW_EVERY_S),
            scheduler,
            loop.jobs,
            stage_out=runner.stage_out,
            stage_in=runner.stage_in,
            recompute=transfer.kv_load_failure_policy == "recompute",
        )
    info = WorkerInfo(
        engine_id=identity.engine_id,
        epoch=identity.epoch,
        model=model.name,
        role=ROLES[transfer.kv_role] if transfer is not None else "both",
        fingerprint=identity.fingerprint,
        connector=None if transfers is None else transfers.connector.name,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        block_size=pool.layout.block_size,
        kv_block_bytes=pool.layout.num_planes * pool.layout.block_bytes,
        num_blocks=pool.layout.num_blocks,
        num_free_blocks=pool.layout.num_blocks,
        num_held_blocks=0,
        num_running=0,
        num_waiting=0,
        kv_events_endpoint="" if publisher is None else publisher.endpoint,
        kv_replay_endpoint="" if publisher is None else publisher.replay_endpoint,
    )
    limits = Limits(model.vocab_size, model.max_model_len, config.max_num_seqs, config.max_logprobs)
    loop.after_step = _publishing(publisher, cache_log)
    loop.start(transfers)
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
        yield Engine(
            loop, info, limits, model.eos_token_ids, transfer, config.stall_timeout_s, grammars, surroundings.wall_clock
        )
    finally:
        loop.stop()
        if transfers is not None:
            transfers.connector.close()
        if publisher is not None:
            publisher.close()


def _publisher(events: KVEventsConfig | None, wall_clock: Callable[[], float]) -> EventPublisher | None:
    if events is None or not events.enable_kv_cache_events:
        return None
    try:
        from fourhop.engine.publisher import EventPublisher
    except ModuleNotFoundError as error:
        raise StartError(f"--kv-events-config needs {error.name}: pip install 'fourhop[events]'") from None
    return EventPublisher(events, wall_clock)


def _publishing(publisher: EventPublisher | None, cache_log: CacheLog | None) -> Callable[[], None]:
    """What the loop does after each step."""
    if publisher is None or cache_log is None:
        return lambda: None
    return lambda: publisher.publish(cache_log.take())


def _ledger(
    config: KVTransferConfig,
    connector: Connector,
    identity: Identity,
    layout: BlockLayout,
    wall_clock: Callable[[], float],
) -> HoldLedger:
    options = config.kv_connector_extra_config
    return HoldLedger(
        connector,
        identity,
        block_size=layout.block_size,
        lease_s=options.kv_lease_duration,
        secret=options.secret,
        wall_clock=wall_clock,
    )


def _step_limits(config: EngineConfig, model: Model, layout: BlockLayout) -> StepLimits:
    return StepLimits(
        block_size=layout.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=model.max_model_len,
        prefix_caching=config.enable_prefix_caching,
        max_handover_tokens=min(config.max_num_batched_tokens, config.max_handover_tokens),
        max_prompt_logits=max(1, PROMPT_LOGITS_BYTES // (4 * model.vocab_size)),
    )
