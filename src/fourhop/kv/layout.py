"""The geometry of a KV pool, and the pool's memory.

A pool holds `num_blocks` blocks of `block_size` tokens for every layer, laid out plane by plane: plane 2·l is layer
l's keys, plane 2·l+1 its values. Within a plane block b is `block_bytes` contiguous bytes, so a run of neighbouring
blocks is one contiguous range per plane: attention reads it without gathering and a connector copies it whole.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LAYOUT_VERSION = 1
"""Counts up when blocks are laid out differently; part of an engine's fingerprint."""


@dataclass(frozen=True)
class BlockLayout:
    """Sizes of a pool. Two pools can exchange blocks when all but `num_blocks` are equal."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    itemsize: int
    num_blocks: int

    @property
    def num_planes(self) -> int:
        return 2 * self.num_layers

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one plane."""
        return self.block_size * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_planes * self.num_blocks * self.block_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def geometry(self) -> tuple[int, ...]:
        """What must be equal on both sides of a transfer; `GEOMETRY` names the numbers."""
        return (self.num_layers, self.num_kv_heads, self.head_dim, self.block_size, self.itemsize)


GEOMETRY = ("num_layers", "num_kv_heads", "head_dim", "block_size", "itemsize")


class KVPool:
    """The memory of a pool, as bytes: `planes` has shape [num_planes, num_blocks, block_bytes], dtype uint8.

    The memory is an anonymous file (memfd) that other processes of the same user can map through `path`; the kernel
    frees it when the last mapping goes, so a killed engine leaves nothing behind. Every page is allocated at once: a
    first touch later costs five times the copy that touches it. The size is sealed, so no reader can meet a hole.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        num_bytes = max(1, layout.num_bytes)
        self._fd = os.memfd_create("fourhop-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, num_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap.mmap(self._fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.planes = as_planes(self._map, layout)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def fileno(self) -> int:
        """The file's descriptor in this process."""
        return self._fd

    def close(self) -> None:
        """Close the file. The mapping lives as long as something (a tensor, an array) refers to it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def as_planes(buffer: mmap.mmap, layout: BlockLayout) -> npt.NDArray[np.uint8]:
    """A mapping as [num_planes, num_blocks, block_bytes] bytes, without a copy."""
    flat = np.frombuffer(buffer, dtype=np.uint8, count=layout.num_bytes)
    return flat.reshape(layout.num_planes, layout.num_blocks, layout.block_bytes)


def runs(source: list[int], target: list[int]) -> list[tuple[int, int, int]]:
    """Pair two equally long lists of block ids into runs (source, target, length) that are contiguous on both sides."""
    paired: list[tuple[int, int, int]] = []
    for src, dst in zip(source, target, strict=True):
        if paired and paired[-1][0] + paired[-1][2] == src and paired[-1][1] + paired[-1][2] == dst:
            start_src, start_dst, length = paired[-1]
            paired[-1] = (start_src, start_dst, length + 1)
        else:
            paired.append((src, dst, 1))
    return paired
