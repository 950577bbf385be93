"""The conversation between a consumer and a producer: messages, framing, and the little server that answers.

One connection per pull:

    consumer                       producer
    Claim           ──▶            checks boot id, ticket, geometry; the ticket is used from here on
                    ◀──            Granted (or Refused, and the end)
                    ◀──            Ready: blocks that are ready, the bytes of which may follow
      ... the consumer has copied them ...
    More            ──▶            waits until there are more
                    ◀──            Ready, and so on until the one with the tail (or Refused)
    Release         ──▶            is the ticket still held? then its blocks are the engine's again
                    ◀──            Confirmed (or Refused)

A Ready takes all that became ready while the consumer copied. One without blocks says that the producer lives; it comes
every `keep_alive_s`, so neither side waits for a dead one. When the connection of a claim ends early the producer ends
the ticket too, because nobody else may claim it.

Renew and Decline are notes: connections of one message, without an answer.

A frame is a length, a checksum (4 bytes each, big-endian) and a msgpack map whose `type` names the message; unknown
fields are ignored, so messages can gain optional ones. The checksum covers the frame's number too, so frames that were
changed, lost, repeated or exchanged end the conversation instead of misleading it. Each side waits for the other for at
most its own timeout, and whatever is wrong with a connection ends that one only.
"""

from __future__ import annotations

import select
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Annotated, TypeVar

import msgspec

from fourhop.kv.connector import CAUSES, PullError

VERSION = 3
HEADER = struct.Struct(">II")
MAX_REQUEST_BYTES = 64 * 2**10
MAX_ANSWER_BYTES = 8 * 2**20
"""An answer may carry the block list of a prompt of millions of tokens. A longer frame is never read."""

NUM_BUFFERS_PER_CALL = 256
MAX_MESSAGE_CHARS = 300


class Claim(msgspec.Struct, frozen=True, kw_only=True, tag="claim"):
    """`geometry` is `BlockLayout.geometry()`; wanted are the ticket's blocks after the first `skip_blocks`,
    with a Sum after the bytes of each Ready if `checksum`."""

    version: int = VERSION
    connector: str
    ticket_id: str
    epoch: str
    geometry: tuple[int, ...]
    skip_blocks: int
    num_blocks: int
    checksum: bool = False


class SharedMemory(msgspec.Struct, frozen=True):
    """A pool as a file of a process: descriptor `fd` of `pid`, which is the file `inode`."""

    pid: int
    fd: int
    inode: int
    pool_blocks: int


class Agent(msgspec.Struct, frozen=True):
    """A NIXL agent, its name new in every life: how to reach it, and where in its memory its pool begins."""

    name: str
    metadata: bytes
    address: Annotated[int, msgspec.Meta(gt=0, lt=2**56)]
    pool_blocks: Annotated[int, msgspec.Meta(gt=0, lt=2**31)]


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """What the connector's consumer needs to get at the bytes, if anything."""

    memory: SharedMemory | None = None
    agent: Agent | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The next blocks of the claim are final, these of the producer's; with the last ones comes the ticket's tail."""

    block_ids: list[int]
    tail: bytes | None = None


class Sum(msgspec.Struct, frozen=True, tag="sum"):
    """The checksum of the bytes that were sent since the last Ready."""

    checksum: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    cause: str
    message: str


class More(msgspec.Struct, frozen=True, tag="more"):
    """The blocks so far are copied."""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """All bytes are in; may they be trusted?"""


class Confirmed(msgspec.Struct, frozen=True, tag="confirmed"):
    """They were valid to the end."""


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """The consumer will come for this ticket later."""

    ticket_id: str
    epoch: str


class Decline(msgspec.Struct, frozen=True, tag="decline"):
    """The consumer wants this ticket no more."""

    ticket_id: str
    epoch: str


Opening = Claim | Renew | Decline
Request = TypeVar("Request", More, Release)
Answer = TypeVar("Answer", Granted, Ready, Sum, Confirmed)


def seal(body: bytes, number: int) -> bytes:
    """A frame, the `number`th of its direction, counted from 0."""
    return HEADER.pack(len(body), zlib.crc32(body, number)) + body


def check_seal(body: bytes | bytearray, checksum: int, number: int) -> None:
    """Raises msgspec.DecodeError for a body that is not the one that was sealed under that number."""
    if zlib.crc32(body, number) != checksum:
        raise msgspec.DecodeError("a frame whose checksum is not its own")


class Channel:
    """A connected socket that speaks frames and raw bytes, and waits for its peer for at most `timeout_s` at a time.

    A frame must be there whole within that time; of raw bytes, some. With `has_sums` a Sum follows raw bytes. Raises
    TimeoutError, ConnectionError when the peer is gone, msgspec.DecodeError for nonsense.
    """

    def __init__(self, sock: socket.socket, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._sock = sock
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline_s = clock() + timeout_s
        self._num_sent = self._num_received = 0
        self.has_sums = False
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connect(self, host: str, port: int) -> None:
        self._arm()
        self._sock.connect((host, port))

    def send(self, message: msgspec.Struct) -> None:
        self.send_buffers([memoryview(seal(msgspec.msgpack.encode(message), self._num_sent))])
        self._num_sent += 1

    def peer(self) -> str:
        """The address at the other end."""
        return str(self._sock.getpeername())

    def is_readable(self, timeout_s: float) -> bool:
        """Whether the peer speaks or hangs up before that time is over."""
        waiting = select.poll()
        waiting.register(self._sock, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1e3))

    def receive_opening(self) -> Opening:
        """Producer: the first frame."""
        return msgspec.msgpack.decode(self._frame(MAX_REQUEST_BYTES), type=Opening)

    def receive(self, kind: type[Request]) -> None:
        """Producer: the next frame, which must be a `kind`."""
        msgspec.msgpack.decode(self._frame(MAX_REQUEST_BYTES), type=kind)

    def expect(self, kind: type[Answer]) -> Answer:
        """Consumer: the next frame, which must be a `kind`. Raises PullError when it is a refusal."""
        answer = msgspec.msgpack.decode(self._frame(MAX_ANSWER_BYTES), type=Granted | Ready | Sum | Confirmed | Refused)
        if isinstance(answer, Refused):
            cause = answer.cause if answer.cause in CAUSES else "protocol"
            raise PullError(cause, answer.message[:MAX_MESSAGE_CHARS])
        if not isinstance(answer, kind):
            raise msgspec.DecodeError(f"{type(answer).__name__} where {kind.__name__} was due")
        return answer

    def ask(self, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        """Consumer: send a message and expect its answer."""
        self.send(message)
        return self.expect(kind)

    def send_buffers(self, buffers: Iterable[memoryview]) -> None:
        """Gather buffers of bytes into the stream, without joining them."""
        for batch in batches(buffers):
            pending = batch
            while pending:
                self._restart()
                pending = after(pending, self._sock.sendmsg(pending))

    def receive_into(self, buffers: Iterable[memoryview]) -> None:
        """Scatter the stream into buffers of bytes."""
        for batch in batches(buffers):
            pending = batch
            while pending:
                self._restart()
                pending = after(pending, self._receive_some(pending))

    def _restart(self) -> None:
        """Grant the peer the full time again, from here on."""
        self._deadline_s = self._clock() + self._timeout_s
        self._arm()

    def _arm(self) -> None:
        left_s = self._deadline_s - self._clock()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(max(0.001, left_s))

    def _receive_some(self, buffers: list[memoryview]) -> int:
        num_bytes = self._sock.recvmsg_into(buffers)[0]
        if not num_bytes:
            raise ConnectionError("the connection was closed")
        return num_bytes

    def _frame(self, max_bytes: int) -> bytearray:
        self._restart()
        num_bytes, checksum = HEADER.unpack(self._exactly(HEADER.size))
        if not 0 < num_bytes <= max_bytes:
            raise msgspec.DecodeError(f"a frame of {num_bytes} bytes")
        body = self._exactly(num_bytes)
        check_seal(body, checksum, self._num_received)
        self._num_received += 1
        return body

    def _exactly(self, num_bytes: int) -> bytearray:
        """The next bytes, before the deadline."""
        data = bytearray(num_bytes)
        pending = [memoryview(data)]
        while pending:
            self._arm()
            pending = after(pending, self._receive_some(pending))
        return data


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
