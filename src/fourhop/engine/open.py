"""Starts an engine on a model's folder: device, weights, pool, runner, and then its other parts."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import torch

from fourhop.engine.assembly import Model, run_engine
from fourhop.engine.attention import ATTENTION
from fourhop.engine.config import EngineConfig
from fourhop.engine.grammar import Grammars
from fourhop.engine.model import LoadedModel, fingerprint, load_model
from fourhop.engine.runner import Runner
from fourhop.engine.server import Engine
from fourhop.kv.config import KVEventsConfig, KVTransferConfig
from fourhop.kv.layout import BlockLayout, KVPool
from fourhop.wire.errors import StartError

Progress = Callable[[int, int], None]


@contextlib.asynccontextmanager
async def open_engine(
    config: EngineConfig,
    folder: Path,
    *,
    name: str,
    transfer: KVTransferConfig | None = None,
    events: KVEventsConfig | None = None,
    progress: Progress = lambda done, total: None,
) -> AsyncIterator[Engine]:
    """A running engine for the model in `folder`. Raises StartError when it cannot be had.

    `progress` is called with bytes of weights loaded and their total.
    """
    device = _device(config.device)
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    # On a thread, so that a signal during the load is acted on at once.
    loaded = await asyncio.to_thread(
        load_model, folder, dtype=config.dtype, device=str(device), attention=ATTENTION, progress=progress
    )
    layout = _layout(config, loaded)
    model = Model(
        name=name,
        fingerprint=fingerprint(loaded, block_size=layout.block_size),
        vocab_size=loaded.vocab_size,
        max_model_len=_window(config, loaded, layout),
        eos_token_ids=loaded.eos_token_ids,
    )
    pool = await asyncio.to_thread(KVPool, layout)
    try:
        runner = Runner(loaded, pool, device)
        grammars = Grammars(folder, loaded.vocab_size, loaded.eos_token_ids)
        async with run_engine(
            config, model, runner, pool, transfer=transfer, events=events, grammars=grammars
        ) as engine:
            yield engine
    finally:
        pool.close()


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise StartError("--device cuda: this machine has no CUDA device")
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def _layout(config: EngineConfig, model: LoadedModel) -> BlockLayout:
    """The pool's geometry; its size from `num_blocks`, else from `kv_cache_bytes`."""
    if config.block_size < 1:
        raise StartError(f"--block-size {config.block_size}: must be at least 1")
    sizes = (model.num_layers, model.num_kv_heads, model.head_dim, config.block_size, model.dtype.itemsize)
    one = BlockLayout(*sizes, num_blocks=1)
    num_blocks = config.num_blocks if config.num_blocks is not None else config.kv_cache_bytes // one.num_bytes
    if num_blocks < 2:
        raise StartError(f"the KV pool has room for {num_blocks} blocks; raise --kv-cache-bytes or --num-blocks")
    return BlockLayout(*sizes, num_blocks=num_blocks)


def _window(config: EngineConfig, model: LoadedModel, layout: BlockLayout) -> int:
    """The longest sequence: what was asked, bounded by the model; one sequence always fits the pool."""
    capacity = layout.num_blocks * layout.block_size
    asked = config.max_model_len
    if asked is None:
        return int(min(model.max_position_embeddings, capacity))
    if not 2 <= asked <= model.max_position_embeddings:
        raise StartError(f"--max-model-len {asked}: must be between 2 and {model.max_position_embeddings}")
    if asked > capacity:
        raise StartError(f"--max-model-len {asked}: the KV pool holds {capacity} tokens; raise --kv-cache-bytes")
    return asked
