"""`shm`: engines on one host. The consumer maps the producer's pool and copies the blocks once, run by run."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fourhop.kv.connector import PullError
from fourhop.kv.control import Channel, Granted, SharedMemory
from fourhop.kv.layout import BlockLayout, KVPool, as_planes, runs

Planes = npt.NDArray[np.uint8]


class ShmMover:
    """Mappings of peers' pools are kept from pull to pull: a fresh one costs a third of the copy in page faults."""

    name = "shm"

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._mappings = Mappings()

    def grant(self) -> Granted:
        fd = self._pool.fileno()
        return Granted(SharedMemory(os.getpid(), fd, os.fstat(fd).st_ino, self._pool.layout.num_blocks))

    def send(self, channel: Channel, block_ids: list[int]) -> None:
        """Nothing: the consumer reads."""

    def receive(self, channel: Channel, granted: Granted, source: list[int], target: list[int]) -> None:
        memory = granted.memory
        if memory is None or not all(0 <= block_id < memory.pool_blocks for block_id in source):
            raise PullError("protocol", "the producer granted blocks outside its pool")
        if not source:
            return
        planes = self._mappings.find(memory, replace(self._pool.layout, num_blocks=memory.pool_blocks))
        for src, dst, length in runs(source, target):
            np.copyto(self._pool.planes[:, dst : dst + length], planes[:, src : src + length])

    def prune(self) -> None:
        self._mappings.prune()

    def close(self) -> None:
        self._mappings.clear()


@dataclass(frozen=True)
class FileOf:
    """A file by the process that holds it open. The inode tells it from whatever takes its place there later."""

    pid: int
    fd: int
    inode: int

    @property
    def path(self) -> Path:
        return Path(f"/proc/{self.pid}/fd/{self.fd}")

    def exists(self) -> bool:
        try:
            return self.path.stat().st_ino == self.inode
        except OSError:
            return False


class Mappings:
    """Peers' pools in our address space, read-only. A mapping keeps the memory of a dead peer: prune when one dies."""

    def __init__(self) -> None:
        self._planes: dict[FileOf, Planes] = {}
        self._lock = threading.Lock()

    def find(self, memory: SharedMemory, layout: BlockLayout) -> Planes:
        """Raises OSError when the file cannot be opened, PullError when it is not a pool of that layout."""
        file = FileOf(memory.pid, memory.fd, memory.inode)
        with self._lock:
            if file not in self._planes:
                self._drop_gone()
                self._planes[file] = map_pool(file, layout)
            return self._planes[file]

    def prune(self) -> None:
        """Unmap the pools of peers that are gone."""
        with self._lock:
            self._drop_gone()

    def clear(self) -> None:
        with self._lock:
            self._planes = {}

    def _drop_gone(self) -> None:
        self._planes = {file: planes for file, planes in self._planes.items() if file.exists()}


def map_pool(file: FileOf, layout: BlockLayout) -> Planes:
    """Map a peer's pool. A sealed size is demanded, because reading past the end of a shrunk file kills the reader."""
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if status.st_ino != file.inode:
            raise PullError("unreachable", "the producer's memory is not where it said: another host or container?")
        if status.st_size != layout.num_bytes or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise PullError("protocol", "the producer's memory is not a pool of the size it said")
        return as_planes(mmap.mmap(fd, layout.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ), layout)
    finally:
        os.close(fd)
