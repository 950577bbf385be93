"""`tcp`: the producer streams the blocks, plane by plane, from its pool's memory straight into the consumer's.

Socket buffers keep the kernel's own tuning: fixed ones of 4 MiB are a quarter slower on loopback.
"""

from __future__ import annotations

from collections.abc import Iterator

from fourhop.kv.control import Channel, Granted
from fourhop.kv.layout import BlockLayout, KVPool, runs


class TcpMover:
    """After each Ready comes, for each plane, its blocks in ticket order; where those lie on either side does not
    show."""

    name = "tcp"

    def __init__(self, pool: KVPool) -> None:
        self._layout = pool.layout
        self._memory = pool.planes.reshape(-1).data

    def grant(self) -> Granted:
        return Granted()

    def send(self, channel: Channel, block_ids: list[int]) -> None:
        channel.send_buffers(stretches(self._memory, self._layout, block_ids))

    def receive(self, channel: Channel, granted: Granted, source: list[int], target: list[int]) -> None:
        channel.receive_into(stretches(self._memory, self._layout, target))

    def prune(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""


def stretches(memory: memoryview, layout: BlockLayout, block_ids: list[int]) -> Iterator[memoryview]:
    """The memory of blocks as contiguous stretches: for each plane, each run of neighbouring blocks."""
    size = layout.block_bytes
    spans = [(start * size, (start + length) * size) for start, _, length in runs(block_ids, block_ids)]
    for plane in range(layout.num_planes):
        base = plane * layout.num_blocks * size
        for begin, end in spans:
            yield memory[base + begin : base + end]
