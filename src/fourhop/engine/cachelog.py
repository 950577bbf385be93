"""What the prefix cache gained and lost since it was last asked: the events of one step. Pure.

Blocks under a cache salt are left out: their tokens are one tenant's, and events are for everybody.
"""

from __future__ import annotations

from fourhop.wire.events import BlockRemoved, BlockStored, Event


class CacheLog:
    """Told by the scheduler and the block pool, in the order in which things happen."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[Event] = []
        self._known: set[bytes] = set()

    def stored(self, hashes: list[bytes], parent: bytes | None, token_ids: list[int]) -> None:
        """Blocks that follow one another became findable."""
        self._known.update(hashes)
        self._events.append(
            BlockStored(
                block_hashes=[number_of(name) for name in hashes],
                parent_block_hash=None if parent is None else number_of(parent),
                token_ids=token_ids,
                block_size=self._block_size,
                medium="CPU",
            )
        )

    def removed(self, name: bytes) -> None:
        """A block was taken for something else."""
        if name not in self._known:
            return
        self._known.discard(name)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(number_of(name))
        else:
            self._events.append(BlockRemoved(block_hashes=[number_of(name)], medium="CPU"))

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def number_of(name: bytes) -> int:
    """A block's hash as vLLM publishes its own: the low 64 bits."""
    return int.from_bytes(name[-8:], "big")
