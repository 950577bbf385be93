"""Engines that are listed in a file, which is read again when it changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from fourhop.router.discovery.source import Engines, SourceError, engines_of
from fourhop.router.document import read_document
from fourhop.wire.errors import StartError

Signature = tuple[int, int, int]
"""What changes when a file does."""


class EngineList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says: URLs of the engines, by role."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


def read_engines(path: Path) -> Engines:
    """A JSON or TOML file of engines. Raises StartError, naming what is wrong.

    A file without any engine is an error: it is more likely cut off than meant.
    """
    listed = read_document(path, EngineList)
    try:
        engines = engines_of(listed.prefill, listed.decode)
    except StartError as error:
        raise StartError(f"{path}: {error}") from None
    if not engines:
        raise StartError(f"{path} lists no engine")
    return engines


class FileSource:
    """The engines of a file. Raises StartError if it cannot be read to begin with."""

    name = "file"
    interval_s = 1.0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = signature(path)
        self.engines = read_engines(path)
        self._wrong: str | None = None

    async def look(self) -> None:
        await asyncio.to_thread(self._look)
        if self._wrong is not None:
            raise SourceError(self._wrong)

    def _look(self) -> None:
        """What is wrong is read again every time: what was wrong may lie outside of the file."""
        seen = signature(self._path)  # before it is read: a file that changes meanwhile differs at the next look
        if seen == self._seen and self._wrong is None:
            return
        self._seen = seen
        try:
            self.engines = read_engines(self._path)
            self._wrong = None
        except StartError as error:
            self._wrong = str(error)


def signature(path: Path) -> Signature | None:
    """None while the file is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
