"""What a store holds, as files of one folder that many engines share.

    store.id                who this store is, made by the first engine that opens it
    blocks/KEY              a block, all planes of it; KEY is a hash of geometry, model fingerprint and content name
    tickets/KEY.state       how far a ticket is: rewritten by its producer, at least every second until it is whole
    tickets/KEY.claim       its one consumer made this
    tickets/KEY.declined    and wants it no more

Nothing is ever locked. All files but `store.id` go when the store is full, the least recently used first.
"""

from __future__ import annotations

import contextlib
import threading
import uuid

import msgspec

from fourhop.kv.connector import PullError
from fourhop.kv.folders import Folder
from fourhop.kv.layout import BlockLayout
from fourhop.kv.records import DamagedError, key_of, seal, unseal
from fourhop.wire.errors import StartError

ID_FILE = "store.id"
FULL_SHARE = 0.9
"""What is left of a full store, so that it is not full again at once."""

CHECK_SHARE = 0.02
"""An engine looks at the store's size when it has written this much of it."""


class TicketState(msgspec.Struct, frozen=True):
    """How far a ticket is. `tail` comes with the last block; `ended`, a cause, when it came to nothing. `beat` counts,
    so that no two states are equal while the producer lives."""

    epoch: str
    geometry: tuple[int, ...]
    num_blocks: int
    num_ready: int = 0
    tail: bytes | None = None
    ended: str = ""
    beat: int = 0


class Shelf:
    """Reads and writes blocks and tickets. Blocks the caller; thread-safe. Raises OSError when the folder does."""

    def __init__(self, folder: Folder, layout: BlockLayout, max_bytes: int) -> None:
        self._folder = folder
        self._geometry = layout.geometry()
        self._block_bytes = layout.num_planes * layout.block_bytes
        self._max_bytes = max_bytes
        self._unchecked_bytes = max_bytes
        self._checking = threading.Lock()
        self.store_id = open_store(folder)

    def has_block(self, fingerprint: str, name: bytes) -> bool:
        return self._folder.exists(block_path(self._key(fingerprint, name)))

    def put_block(self, fingerprint: str, name: bytes, content: bytes) -> None:
        key = self._key(fingerprint, name)
        self._folder.write(block_path(key), seal(key, content))
        self._unchecked_bytes += len(content)

    def use_block(self, fingerprint: str, name: bytes) -> bool:
        """Whether the block is there; if so, it is the last to go."""
        try:
            self._folder.touch(block_path(self._key(fingerprint, name)))
        except FileNotFoundError:
            return False
        return self.has_block(fingerprint, name)

    def get_block(self, fingerprint: str, name: bytes) -> memoryview:
        """A block's content. Raises PullError when it is gone, or damaged: then it is gone too."""
        key = self._key(fingerprint, name)
        path = block_path(key)
        try:
            content = unseal(key, self._folder.read(path))
            if len(content) != self._block_bytes:
                raise DamagedError(f"a block of {len(content)} bytes")
        except FileNotFoundError:
            raise PullError("withdrawn", "the store has dropped a block of the ticket to make room") from None
        except DamagedError as error:
            self._remove(path)
            raise PullError("corrupt", f"a block in the store is damaged: {error}") from None
        with contextlib.suppress(FileNotFoundError):  # dropped since it was read
            self._folder.touch(path)
        return content

    def put_state(self, ticket_id: str, state: TicketState) -> None:
        key = key_of(ticket_id)
        self._folder.write(ticket_path(key, "state"), seal(key, msgspec.msgpack.encode(state)))

    def get_state(self, ticket_id: str) -> TicketState | None:
        """None when there is none, or none that can be read: its writer may be at it."""
        key = key_of(ticket_id)
        try:
            return msgspec.msgpack.decode(unseal(key, self._folder.read(ticket_path(key, "state"))), type=TicketState)
        except (FileNotFoundError, DamagedError, msgspec.DecodeError):
            return None

    def claim(self, ticket_id: str) -> None:
        """Make a ticket this consumer's. Raises PullError when it is another's."""
        try:
            self._folder.create(ticket_path(key_of(ticket_id), "claim"), b"")
        except FileExistsError:
            raise PullError("used", f"ticket {ticket_id} was claimed before") from None

    def decline(self, ticket_id: str) -> None:
        """Let nobody claim a ticket any more, and let its producer know."""
        for kind in ("claim", "declined"):
            with contextlib.suppress(FileExistsError):
                self._folder.create(ticket_path(key_of(ticket_id), kind), b"")

    def is_declined(self, ticket_id: str) -> bool:
        return self._folder.exists(ticket_path(key_of(ticket_id), "declined"))

    def make_room(self) -> None:
        """Drop what was not used for longest if the store has grown too large since somebody last looked.

        Engines do this each for itself, so a store may be some CHECK_SHARE per engine larger than it should.
        """
        if self._unchecked_bytes < CHECK_SHARE * self._max_bytes or not self._checking.acquire(blocking=False):
            return
        try:
            self._unchecked_bytes = 0
            self._drop_oldest()
        finally:
            self._checking.release()

    def _drop_oldest(self) -> None:
        entries = [entry for entry in self._folder.entries() if entry.path != ID_FILE]
        num_bytes = sum(entry.num_bytes for entry in entries)
        if num_bytes <= self._max_bytes:
            return
        for entry in sorted(entries, key=lambda entry: entry.used_at_s):
            if num_bytes <= FULL_SHARE * self._max_bytes:
                return
            self._remove(entry.path)
            num_bytes -= entry.num_bytes

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another engine was quicker
            self._folder.remove(path)

    def _key(self, fingerprint: str, name: bytes) -> bytes:
        return key_of(self._geometry, fingerprint, name)


def block_path(key: bytes) -> str:
    return f"blocks/{key.hex()[:2]}/{key.hex()}"


def ticket_path(key: bytes, kind: str) -> str:
    return f"tickets/{key.hex()[:2]}/{key.hex()}.{kind}"


def open_store(folder: Folder) -> str:
    """The store's id. Raises StartError when the folder cannot be used."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.create(ID_FILE, uuid.uuid4().hex.encode())
        try:
            folder.create(ID_FILE, b"")
        except FileExistsError:
            return folder.read(ID_FILE).decode()
    except (OSError, NotImplementedError, TypeError, ValueError) as error:
        raise StartError(f"the KV store cannot be written: {error}") from None
    raise StartError("the KV store's file system cannot create a file for just one of two writers")
