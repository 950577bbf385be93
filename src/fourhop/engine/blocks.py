"""The block pool's bookkeeping: who uses which block, and which freed blocks can be found again by their tokens.

Every block is in exactly one state: used (reference count above zero), clean (free, content meaningless) or cached
(free, content known by its hash, evicted in LRU order). Pure: it moves numbers, never bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable


def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    """The name of a full block: SHA-256 over its parent's name and its tokens. Equal in every process."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def root_hash(salt: str) -> bytes:
    """The parent of a first block. Different salts never share a block; no salt and an empty one are the same."""
    return hashlib.sha256(b"fourhop-kv\0" + salt.encode()).digest()


def extend_hashes(hashes: list[bytes], token_ids: list[int], block_size: int, salt: str) -> None:
    """Append to `hashes` the names of the full blocks of `token_ids` that are not in it yet."""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else root_hash(salt)
        hashes.append(hash_block(parent, token_ids[start : start + block_size]))


class BlockPool:
    """Allocates blocks, preferring neighbours: a contiguous sequence is read and copied without gathering."""

    def __init__(self, num_blocks: int, on_evicted: Callable[[bytes], None] | None = None) -> None:
        """`on_evicted` is told the name of each block that cannot be found any more."""
        self.num_blocks = num_blocks
        self._on_evicted = on_evicted
        self._references = [0] * num_blocks
        self._clean = bytearray(b"\1" * num_blocks)  # 1 where the block is clean; a run is found with bytes.find
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._num_clean = num_blocks

    @property
    def num_free(self) -> int:
        return self._num_clean + len(self._cached)

    def find(self, hashes: list[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `hashes`. Takes nothing: `share` does."""
        blocks = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_after_sharing(self, blocks: list[int]) -> int:
        """How many blocks `allocate` could still give once `blocks` were shared."""
        return self.num_free - sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: list[int]) -> None:
        """Use blocks that `find` returned, beside whoever uses them already."""
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] += 1

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` blocks for one user, neighbours of `after` or of each other where possible.

        Raises RuntimeError when fewer are free: the caller asks `num_free` first.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks wanted, {self.num_free} free")
        start = self._clean_run(count, after)
        blocks = list(range(start, start + count)) if start >= 0 else self._scattered(count)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def name(self, block: int, block_hash: bytes) -> bool:
        """Say what a full, used block holds; True if it can be found by that from now on.

        Of two blocks with the same content the first keeps the name.
        """
        if block_hash in self._block_of or block in self._hash_of:
            return False
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def release(self, blocks: list[int]) -> None:
        """Give up one use of each block. A sequence's tail is evicted before its head, so it is freed first."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise RuntimeError(f"block {block} is released but not used")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._set_clean(block)

    def check(self) -> None:
        """Raise RuntimeError unless used + clean + cached are all blocks and the names agree with one another."""
        used = sum(count > 0 for count in self._references)
        if used + self._num_clean + len(self._cached) != self.num_blocks or self._num_clean != sum(self._clean):
            raise RuntimeError(f"blocks: {used} used, {self._num_clean} clean, {len(self._cached)} cached")
        if any(self._references[block] for block in self._cached) or min(self._references, default=0) < 0:
            raise RuntimeError("a cached block is in use, or a reference count is negative")
        if {block: name for name, block in self._block_of.items()} != self._hash_of:
            raise RuntimeError("names and blocks disagree")

    def _clean_run(self, count: int, after: int | None) -> int:
        """The start of `count` neighbouring clean blocks, taken; -1 if there are none."""
        if count == 0 or count > self._num_clean:
            return -1
        wanted = b"\1" * count
        start = after + 1 if after is not None and self._clean.startswith(wanted, after + 1) else -1
        if start < 0:
            start = self._clean.find(wanted)
        if start >= 0:
            self._clean[start : start + count] = bytes(count)
            self._num_clean -= count
        return start

    def _scattered(self, count: int) -> list[int]:
        """Clean blocks wherever they are, then the least recently used cached ones, in ascending order."""
        blocks: list[int] = []
        position = self._clean.find(1)
        while position >= 0 and len(blocks) < count:
            self._clean[position] = 0
            self._num_clean -= 1
            blocks.append(position)
            position = self._clean.find(1, position + 1)
        while len(blocks) < count:
            block, _ = self._cached.popitem(last=False)
            evicted = self._hash_of.pop(block)
            del self._block_of[evicted]
            if self._on_evicted is not None:
                self._on_evicted(evicted)
            blocks.append(block)
        return sorted(blocks)

    def _set_clean(self, block: int) -> None:
        self._clean[block] = 1
        self._num_clean += 1
