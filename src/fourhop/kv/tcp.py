"""`tcp`: the producer streams the blocks, plane by plane, from its pool's memory straight into the consumer's."""

from __future__ import annotations

from collections.abc import Iterator

from fourhop.kv.control import Channel, Granted
from fourhop.kv.layout import KVPool, runs


class TcpMover:
    """The stream is, for each plane, the blocks in ticket order; where they lie on either side does not show in it."""

    name = "tcp"

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def grant(self, block_ids: list[int]) -> Granted:
        return Granted()

    def send(self, channel: Channel, block_ids: list[int]) -> None:
        channel.send_buffers(stretches(self._pool, block_ids))

    def receive(self, channel: Channel, granted: Granted, block_ids: list[int]) -> None:
        channel.receive_into(stretches(self._pool, block_ids))

    def prune(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""


def stretches(pool: KVPool, block_ids: list[int]) -> Iterator[memoryview]:
    """The memory of blocks as contiguous stretches: for each plane, each run of neighbouring blocks."""
    neighbours = runs(block_ids, block_ids)
    for plane in pool.planes:
        for start, _, length in neighbours:
            yield plane[start : start + length].reshape(-1).data
