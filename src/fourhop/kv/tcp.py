"""`tcp`: the producer streams the blocks, plane by plane, from its pool's memory straight into the consumer's.

With `checksum` in the consumer's options the bytes of every Ready are followed by their checksum: TCP's own is 16 bits
wide, and a wrong bit of KV is a wrong answer that nobody notices. It is off by default, because where both engines
share two cores it costs a third of the rate (`benchmarks/handover.py`: 0.5 of a bare socket's instead of 0.75). Bytes
are summed in the pieces in which they are sent, while they are in the processor's cache.

Socket buffers keep the kernel's own tuning: fixed ones of 4 MiB are a quarter slower on loopback.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from xxhash import xxh3_64

from fourhop.kv.connector import PullError
from fourhop.kv.control import Channel, Granted, Sum
from fourhop.kv.layout import BlockLayout, KVPool, runs

PIECE_BYTES = 512 * 2**10
"""Less than a core's second-level cache."""


class TcpMover:
    """After each Ready comes, for each plane, its blocks in ticket order; where those lie on either side does not
    show. Then their Sum, if the conversation has sums."""

    name = "tcp"

    def __init__(self, pool: KVPool) -> None:
        self._layout = pool.layout
        self._memory = pool.planes.reshape(-1).data

    def grant(self) -> Granted:
        return Granted()

    def send(self, channel: Channel, block_ids: list[int]) -> None:
        buffers = stretches(self._memory, self._layout, block_ids)
        if channel.has_sums:
            send_summed(channel, buffers)
        else:
            channel.send_buffers(buffers)

    def receive(self, channel: Channel, granted: Granted, source: list[int], target: list[int]) -> None:
        buffers = stretches(self._memory, self._layout, target)
        if channel.has_sums:
            receive_summed(channel, buffers)
        else:
            channel.receive_into(buffers)

    def prune(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""


def send_summed(channel: Channel, buffers: Iterable[memoryview]) -> None:
    digest = xxh3_64()
    for piece in pieces(buffers):
        for buffer in piece:
            digest.update(buffer)
        channel.send_buffers(piece)
    channel.send(Sum(digest.intdigest()))


def receive_summed(channel: Channel, buffers: Iterable[memoryview]) -> None:
    """Raises PullError when the bytes are not those that were sent."""
    digest = xxh3_64()
    for piece in pieces(buffers):
        channel.receive_into(piece)
        for buffer in piece:
            digest.update(buffer)
    if channel.expect(Sum).checksum != digest.intdigest():
        raise PullError("corrupt", "the blocks that came are not the blocks that were sent")


def stretches(memory: memoryview, layout: BlockLayout, block_ids: list[int]) -> Iterator[memoryview]:
    """The memory of blocks as contiguous stretches: for each plane, each run of neighbouring blocks."""
    size = layout.block_bytes
    spans = [(start * size, (start + length) * size) for start, _, length in runs(block_ids, block_ids)]
    for plane in range(layout.num_planes):
        base = plane * layout.num_blocks * size
        for begin, end in spans:
            yield memory[base + begin : base + end]


def pieces(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Buffers of bytes cut and gathered into lists of PIECE_BYTES each; the last one may have fewer."""
    piece: list[memoryview] = []
    room = PIECE_BYTES
    for buffer in buffers:
        while len(buffer) >= room:
            yield [*piece, buffer[:room]]
            buffer = buffer[room:]
            piece, room = [], PIECE_BYTES
        if buffer:
            piece.append(buffer)
            room -= len(buffer)
    if piece:
        yield piece
