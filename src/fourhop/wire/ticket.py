"""How KV changes hands: the request to hold blocks, and the ticket that lets another engine pull them.

Both travel as `kv_transfer_params`, with vLLM's field names where the meaning is the same (NIXL connector, vLLM
0.32). A ticket is checked, never trusted: see `verify`.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, TypeVar

import msgspec

from fourhop.wire.errors import ClientError, TransferError, client_error
from fourhop.wire.logprobs import TokenLogprob
from fourhop.wire.prompt import packed

T = TypeVar("T")


class FirstToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """The token that prefill sampled; decode goes on after it and never samples it again."""

    token_id: int
    logprob: TokenLogprob | None = None


class KVTicket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The right to pull one request's KV blocks from the engine that computed them, once, until it expires.

    `num_tokens` tokens are covered; `block_ids` lists the producer's physical blocks in order, the last one possibly
    partial, and is empty while they are not all known. `epoch` is the producer's boot id, `fingerprint` names weights,
    dtype, block size and layout, and `token_hash` the covered tokens. `expires_at_s` is Unix time.
    """

    ticket_id: str
    connector: str
    epoch: str
    fingerprint: str
    token_hash: str
    expires_at_s: float
    engine_id: str = msgspec.field(name="remote_engine_id")
    request_id: str = msgspec.field(name="remote_request_id")
    host: str = msgspec.field(name="remote_host")
    port: int = msgspec.field(name="remote_port")
    num_tokens: int = msgspec.field(name="remote_num_tokens")
    block_ids: list[list[int]] = msgspec.field(name="remote_block_ids")
    cached_tokens: int = msgspec.field(name="remote_prefill_cached_tokens", default=0)
    first_token: FirstToken | None = None
    address: str = ""
    signature: str = ""
    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    tp_size: int = 1


class HoldRequest(msgspec.Struct, frozen=True):
    """Prefill's instruction: stop after one token and hold the blocks for another engine.

    With `early_ticket` the ticket is the first thing to come back, before anything is computed, so that blocks travel
    as they become ready. `prefix` is a ticket for KV of the prompt's beginning: a help, pulled if it can be.
    """

    early_ticket: bool = False
    prefix: KVTicket | None = None


def parse_transfer_params(params: dict[str, Any] | None) -> HoldRequest | KVTicket | None:
    """`kv_transfer_params` as a value. Raises ClientError with the field's path."""
    if params is None:
        return None
    if params.get("do_remote_prefill"):
        return _convert(params, KVTicket)
    if params.get("do_remote_decode"):
        return _convert({key: params[key] for key in ("early_ticket", "prefix") if key in params}, HoldRequest)
    if any(value is not None and value is not False for value in params.values()):
        raise ClientError(
            "kv_transfer_params must set do_remote_decode or do_remote_prefill", param="kv_transfer_params"
        )
    return None


def _convert(params: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        raise client_error(error, "kv_transfer_params") from None


def hash_tokens(token_ids: list[int]) -> str:
    """SHA-256 of the ids as little-endian 64-bit integers, in hex. Equal across processes and machines."""
    return hashlib.sha256(packed(token_ids)).hexdigest()


def sign(ticket: KVTicket, secret: str) -> KVTicket:
    """The ticket with the signature of the fleet's secret; without a secret it stays unsigned."""
    return msgspec.structs.replace(ticket, signature=_signature(ticket, secret) if secret else "")


def _signature(ticket: KVTicket, secret: str) -> str:
    """HMAC-SHA256 (RFC 2104) over the ticket's MessagePack with an empty signature: every field counts."""
    unsigned = msgspec.msgpack.encode(msgspec.structs.replace(ticket, signature=""))
    return hmac.new(secret.encode(), unsigned, hashlib.sha256).hexdigest()


def verify(ticket: KVTicket, *, fingerprint: str, token_ids: list[int], now_s: float, secret: str = "") -> None:
    """Check a ticket against what this engine is and was asked to decode.

    Raises TransferError naming the first mismatch: `signature` (when there is a secret), `expired`, `fingerprint`,
    `token_count` or `token_hash`. The epoch is checked by the connector, against the producer that answers.
    """
    if secret and not hmac.compare_digest(ticket.signature, _signature(ticket, secret)):
        raise TransferError("signature", f"ticket {ticket.ticket_id[:64]} is not signed with this fleet's secret")
    if now_s >= ticket.expires_at_s:
        raise TransferError("expired", f"ticket {ticket.ticket_id} expired {now_s - ticket.expires_at_s:.1f} s ago")
    if ticket.fingerprint != fingerprint:
        raise TransferError("fingerprint", f"the KV is of {ticket.fingerprint}, this engine needs {fingerprint}")
    if not 0 < ticket.num_tokens <= len(token_ids):
        raise TransferError(
            "token_count", f"the ticket covers {ticket.num_tokens} tokens, the request has {len(token_ids)}"
        )
    covered = token_ids if len(token_ids) == ticket.num_tokens else token_ids[: ticket.num_tokens]
    if ticket.token_hash != hash_tokens(covered):
        raise TransferError("token_hash", "the ticket's tokens are not the request's")
