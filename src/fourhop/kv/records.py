"""Sealed records: bytes that are known by a key, in a form in which damage shows.

    magic 4 · CRC-32 of the rest 4 · length of the body 8 · key 32 · body        integers big-endian

CRC-32 finds every changed byte and every burst of up to 32 bits, and all but one in four billion other changes. The key
is part of it, so a record that was filed under another's name is damage too.
"""

from __future__ import annotations

import hashlib
import struct
import zlib

import msgspec

MAGIC = b"4HB1"
HEADER = struct.Struct(">4sIQ32s")
NUM_UNSUMMED = 8
"""The magic and the checksum itself."""


class DamagedError(Exception):
    """A record that is not what was written."""


def seal(key: bytes, body: bytes) -> bytes:
    """A record of a 32-byte key."""
    rest = HEADER.pack(MAGIC, 0, len(body), key)[NUM_UNSUMMED:]
    checksum = zlib.crc32(body, zlib.crc32(rest))
    return b"".join([MAGIC, checksum.to_bytes(4, "big"), rest, body])


def unseal(key: bytes, record: bytes) -> memoryview:
    """The body of the record of that key. Raises DamagedError."""
    if len(record) < HEADER.size:
        raise DamagedError(f"{len(record)} bytes are no record")
    magic, checksum, num_bytes, found = HEADER.unpack_from(record)
    if magic != MAGIC or found != key or num_bytes != len(record) - HEADER.size:
        raise DamagedError(f"a record of {len(record)} bytes is torn or another's")
    if zlib.crc32(memoryview(record)[NUM_UNSUMMED:]) != checksum:
        raise DamagedError(f"a record of {len(record)} bytes has changed since it was written")
    return memoryview(record)[HEADER.size :]


def key_of(*parts: object) -> bytes:
    """A key that only these parts have, in this order: a hash of their MessagePack."""
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()
