"""What an engine says of itself: who it is, what it can take, how busy it is (`GET /worker`)."""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["prefill", "decode", "both"]


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's identity and load. `epoch` changes at every start; `fingerprint` decides who can share KV."""

    engine_id: str
    epoch: str
    model: str
    role: Role
    fingerprint: str
    connector: str | None
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_held_blocks: int
    num_running: int
    num_waiting: int
