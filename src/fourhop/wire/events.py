"""KV cache events as vLLM 0.32 publishes them: which blocks an engine's prefix cache gained and lost.

A message has three frames: a topic, a sequence number of 8 bytes, big-endian and from 0, and a batch in MessagePack. A
block's hash is whatever its engine calls it, good between that engine's events only.
"""

from __future__ import annotations

from typing import Any

import msgspec

BlockHash = int | bytes

REPLAY_END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number of the message that ends a replay."""


class BlockStored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored", omit_defaults=True):
    """Full blocks, one after the other, that can be found now. `token_ids` are those of all of them.

    `parent_block_hash` is the block before the first one, None at the beginning of a prompt. `extra_keys` are what else
    makes a block what it is: a salt, an adapter.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    extra_keys: Any = None


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[BlockHash]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What changed in one step. `at_s` is Unix time."""

    at_s: float
    events: list[Event]
    data_parallel_rank: int | None = None


def sequence_bytes(number: int) -> bytes:
    return number.to_bytes(8, "big", signed=True)


def sequence_number(frame: bytes) -> int:
    """Raises ValueError for a frame that is none."""
    if len(frame) != 8:
        raise ValueError(f"a sequence number has 8 bytes, not {len(frame)}")
    return int.from_bytes(frame, "big", signed=True)
