"""Where a store keeps its records: a folder of this host, or what fsspec can reach. Paths are relative, with `/`."""

from __future__ import annotations

import contextlib
import datetime
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fourhop.wire.errors import StartError

TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
"""What file systems call the time of a change, in the order of preference."""


class Entry(NamedTuple):
    path: str
    num_bytes: int
    used_at_s: float


class Folder(Protocol):
    """Reads and writes whole files. Raises OSError, FileNotFoundError for what is not there. Any thread may call."""

    def read(self, path: str) -> bytes:
        """The file's content."""

    def write(self, path: str, data: bytes) -> None:
        """Put a file there, or in the place of another."""

    def create(self, path: str, data: bytes) -> None:
        """Put a file there, for one of all who try. Raises FileExistsError for the others."""

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""

    def touch(self, path: str) -> None:
        """Note that a file is in use, if the file system can."""

    def remove(self, path: str) -> None:
        """Take a file away."""

    def entries(self) -> list[Entry]:
        """All files, those of crashed writers too."""


def open_folder(url: str) -> Folder:
    """A path, or a URL of fsspec. Raises StartError."""
    if "://" not in url or url.startswith("file://"):
        return LocalFolder(Path(url.removeprefix("file://")))
    return UrlFolder(url)


class LocalFolder:
    """A file is written under a name of its own and moved into place, so a reader meets it whole or not at all."""

    def __init__(self, root: Path) -> None:
        self._root = root
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartError(f"KV store {root}: {error.strerror}") from None

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        with self._draft(path, data) as draft:
            draft.replace(self._root / path)

    def create(self, path: str, data: bytes) -> None:
        with self._draft(path, data) as draft:
            os.link(draft, self._root / path)

    def exists(self, path: str) -> bool:
        return (self._root / path).exists()

    def touch(self, path: str) -> None:
        os.utime(self._root / path)

    def remove(self, path: str) -> None:
        (self._root / path).unlink()

    def entries(self) -> list[Entry]:
        found = []
        for place in self._root.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                status = place.stat()
                if place.is_file():
                    found.append(Entry(place.relative_to(self._root).as_posix(), status.st_size, status.st_mtime))
        return found

    @contextlib.contextmanager
    def _draft(self, path: str, data: bytes) -> Iterator[Path]:
        """The content in a file of its own, in the folder where `path` shall be; gone at the end."""
        place = self._root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            draft.write_bytes(data)
            yield draft
        finally:
            draft.unlink(missing_ok=True)


class UrlFolder:
    """What fsspec reaches. Object stores put objects whole; of others a reader may meet half a file, which shows.

    Files cannot be marked as used there, so their age counts from when they were written.
    """

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise StartError(f"KV store {url} needs fsspec: pip install fsspec") from None
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
            self._files.makedirs(self._root, exist_ok=True)
        except (ImportError, ValueError, OSError) as error:
            raise StartError(f"KV store {url}: {error}") from None

    def read(self, path: str) -> bytes:
        return bytes(self._files.cat_file(self._at(path)))

    def write(self, path: str, data: bytes) -> None:
        self._files.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(self._at(path), data)

    def create(self, path: str, data: bytes) -> None:
        self._files.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(self._at(path), data, mode="create")

    def exists(self, path: str) -> bool:
        return bool(self._files.exists(self._at(path)))

    def touch(self, path: str) -> None:
        """Nothing: it would mean writing the file again."""

    def remove(self, path: str) -> None:
        self._files.rm_file(self._at(path))

    def entries(self) -> list[Entry]:
        self._files.invalidate_cache()
        found = self._files.find(self._root, detail=True)
        base = len(self._files._strip_protocol(self._root).rstrip("/")) + 1
        return [Entry(path[base:], info["size"] or 0, changed_at_s(info)) for path, info in found.items()]

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"


def changed_at_s(info: Mapping[str, Any]) -> float:
    """Unix time of a file's last change from fsspec's description; 0 when that has none, so that it goes first."""
    when = next((info[name] for name in TIMES if info.get(name) is not None), 0.0)
    if isinstance(when, str):
        when = datetime.datetime.fromisoformat(when)
    return when.timestamp() if isinstance(when, datetime.datetime) else float(when)
