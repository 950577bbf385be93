"""A prompt's ids, written out once for all who hash, compare or send them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

TOKEN_BYTES = 8


class Prompt(list[int]):
    """Ids that do not change any more: what is written of them is kept for the next who asks."""

    packed: bytes | None = None
    encoded: msgspec.Raw | None = None


def packed(token_ids: Sequence[int]) -> bytes:
    """The ids as little-endian 64-bit integers."""
    if not isinstance(token_ids, Prompt):
        return _pack(token_ids)
    if token_ids.packed is None:
        token_ids.packed = _pack(token_ids)
    return token_ids.packed


def encoded(token_ids: Sequence[int]) -> msgspec.Raw:
    """The ids as JSON."""
    if not isinstance(token_ids, Prompt):
        return _encode(token_ids)
    if token_ids.encoded is None:
        token_ids.encoded = _encode(token_ids)
    return token_ids.encoded


def _pack(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}q", *token_ids)


def _encode(token_ids: Sequence[int]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(token_ids))
