"""The conversation between a consumer and a producer: messages, framing, and the little server that answers.

One connection per pull:

    consumer                       producer
    Claim           ──▶            checks boot id, ticket, geometry; the ticket is used from here on
                    ◀──            Granted (or Refused, and the end)
      ... the bytes move, as the connector likes ...
    Release         ──▶            is the ticket still held? then its blocks are the engine's again
                    ◀──            Released (or Refused)

A frame is a length (4 bytes, big-endian) and a msgpack map whose `type` names the message; unknown fields are ignored,
so messages can gain optional ones. A connection lives for at most one pull's time on either side, and whatever is wrong
with one ends that one only.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import msgspec

from fourhop.kv.connector import CAUSES, PullError

VERSION = 1
MAX_REQUEST_BYTES = 64 * 2**10
MAX_ANSWER_BYTES = 8 * 2**20
"""An answer may carry the block list of a prompt of millions of tokens. A longer frame is never read."""

NUM_BUFFERS_PER_CALL = 256
MAX_MESSAGE_CHARS = 300


class Claim(msgspec.Struct, frozen=True, kw_only=True, tag="claim"):
    """`geometry` is `BlockLayout.geometry()`; wanted are the ticket's blocks after the first `skip_blocks`."""

    version: int = VERSION
    connector: str
    ticket_id: str
    epoch: str
    geometry: tuple[int, ...]
    skip_blocks: int
    num_blocks: int


class SharedMemory(msgspec.Struct, frozen=True):
    """A pool as a file of a process: descriptor `fd` of `pid`, which is the file `inode`, and the blocks to read."""

    pid: int
    fd: int
    inode: int
    pool_blocks: int
    block_ids: list[int]


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    memory: SharedMemory | None = None


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    cause: str
    message: str


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The bytes are in; may they be trusted?"""


class Confirmed(msgspec.Struct, frozen=True, tag="confirmed"):
    """They were valid to the end."""


Request = TypeVar("Request", Claim, Release)
Answer = TypeVar("Answer", Granted, Confirmed)


class Channel:
    """A connected socket that speaks frames and raw bytes until `deadline_s` (monotonic).

    Raises TimeoutError at the deadline, ConnectionError when the peer is gone, msgspec.DecodeError for nonsense.
    """

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self._sock = sock
        self._deadline_s = deadline_s
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: msgspec.Struct) -> None:
        frame = msgspec.msgpack.encode(message)
        self.send_buffers([memoryview(struct.pack(">I", len(frame)) + frame)])

    def receive(self, kind: type[Request]) -> Request:
        """Producer: the next frame, which must be a `kind`."""
        return msgspec.msgpack.decode(self._frame(MAX_REQUEST_BYTES), type=kind)

    def ask(self, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        """Consumer: send a message and wait for its answer. Raises PullError when that is a refusal."""
        self.send(message)
        answer = msgspec.msgpack.decode(self._frame(MAX_ANSWER_BYTES), type=Granted | Confirmed | Refused)
        if isinstance(answer, Refused):
            cause = answer.cause if answer.cause in CAUSES else "protocol"
            raise PullError(cause, answer.message[:MAX_MESSAGE_CHARS])
        if not isinstance(answer, kind):
            raise msgspec.DecodeError(f"{type(answer).__name__} where {kind.__name__} was due")
        return answer

    def send_buffers(self, buffers: Iterable[memoryview]) -> None:
        """Gather buffers of bytes into the stream, without joining them."""
        for batch in batches(buffers):
            pending = batch
            while pending:
                self._arm()
                pending = after(pending, self._sock.sendmsg(pending))

    def receive_into(self, buffers: Iterable[memoryview]) -> None:
        """Scatter the stream into buffers of bytes."""
        for batch in batches(buffers):
            pending = batch
            while pending:
                self._arm()
                num_bytes = self._sock.recvmsg_into(pending)[0]
                if not num_bytes:
                    raise ConnectionError("the connection was closed")
                pending = after(pending, num_bytes)

    def check_deadline(self) -> None:
        """Raises TimeoutError past the deadline."""
        if time.monotonic() >= self._deadline_s:
            raise TimeoutError

    def _arm(self) -> None:
        self.check_deadline()
        self._sock.settimeout(max(0.001, self._deadline_s - time.monotonic()))

    def _frame(self, max_bytes: int) -> bytearray:
        head = bytearray(4)
        self.receive_into([memoryview(head)])
        (num_bytes,) = struct.unpack(">I", head)
        if not 0 < num_bytes <= max_bytes:
            raise msgspec.DecodeError(f"a frame of {num_bytes} bytes")
        body = bytearray(num_bytes)
        self.receive_into([memoryview(body)])
        return body


def batches(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Lists of as many buffers as one system call takes."""
    source = iter(buffers)
    while batch := list(islice(source, NUM_BUFFERS_PER_CALL)):
        yield batch


def after(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of buffers of bytes when the first `num_bytes` are done."""
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= len(buffer)
    return []
