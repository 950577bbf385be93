"""What an engine says of itself: who it is, what it can take, how busy it is (`GET /worker`)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fourhop.wire.ticket import KVTicket

Role = Literal["prefill", "decode", "both"]


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's identity and load. `epoch` changes at every start; `fingerprint` decides who can share KV.

    `kv_block_bytes` are those of one block in all layers. `kv_events_endpoint` is where cache events are published, and
    `kv_replay_endpoint` where those that were missed are to be had; empty where they are not.
    """

    engine_id: str
    epoch: str
    model: str
    role: Role
    fingerprint: str
    connector: str | None
    max_model_len: int
    vocab_size: int
    block_size: int
    kv_block_bytes: int = 0
    num_blocks: int
    num_free_blocks: int
    num_held_blocks: int
    num_running: int
    num_waiting: int
    kv_events_endpoint: str = ""
    kv_replay_endpoint: str = ""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket that an engine has issued and that was not pulled yet (`GET /kv/leases`).

    `expires_in_s` is None while the tokens are still being computed.
    """

    ticket_id: str
    request_id: str
    num_tokens: int
    num_blocks: int
    expires_in_s: float | None


class Leases(msgspec.Struct, frozen=True, kw_only=True):
    engine_id: str
    epoch: str
    leases: list[Lease]


class RenewRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /kv/renew`: keep these tickets for another lease."""

    ticket_ids: list[str]


class RenewAnswer(msgspec.Struct, frozen=True):
    """The tickets that are still known, with their new expiry, to be used instead of those that were given out."""

    tickets: list[KVTicket]


class PrefixRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /kv/prefix`: a ticket for the KV of the longest beginning of these tokens that the engine still has.

    `request_id` is the asker's own, so that the ticket can be given back even when the answer is lost.
    """

    token_ids: list[int]
    cache_salt: str | None = None
    request_id: str = ""


class PrefixAnswer(msgspec.Struct, frozen=True):
    """`kv_transfer_params` is a ticket, or None where the engine has nothing of it."""

    kv_transfer_params: dict[str, Any] | None


class MigrateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /inference/v1/migrate`: end these requests with a ticket each, to be gone on with elsewhere."""

    request_ids: list[str]


class MigrateAnswer(msgspec.Struct, frozen=True):
    """How many sequences were running under these names."""

    num_migrated: int
