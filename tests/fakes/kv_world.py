"""Engines as a connector sees them: a pool whose words say whose they are, and a thread that polls."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from fourhop.kv.config import ConnectorOptions, KVTransferConfig
from fourhop.kv.connector import Connector, Event, Notify, Progress, PullFailed, Renewed
from fourhop.kv.connectors import open_connector
from fourhop.kv.layout import BlockLayout, KVPool
from fourhop.kv.local import LocalConnector, LocalNetwork
from fourhop.kv.pulls import PRODUCTION, Conduct
from fourhop.wire.ticket import KVTicket

LAYOUT = BlockLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, itemsize=4, num_blocks=16)
OPTIONS = ConnectorOptions()
WAIT_S = 30.0


class Open(Protocol):
    def __call__(
        self, options: ConnectorOptions, pool: KVPool, epoch: str, notify: Notify, conduct: Conduct
    ) -> Connector: ...


@dataclass(frozen=True)
class Names:
    """What a ticket's blocks held when it was published in one life of its producer."""

    epoch: str
    of_blocks: list[bytes]


@dataclass
class Party:
    """One engine: a pool, its connector, and the wait for events that the engine loop would do."""

    connector: Connector
    pool: KVPool
    epoch: str
    notified: threading.Semaphore
    names: dict[str, Names]
    waiting: list[Event] = field(default_factory=list)
    renewed: list[str] = field(default_factory=list)

    def publish(self, ticket_id: str, block_ids: list[int], tail: bytes = b"") -> KVTicket:
        """Publish a ticket whole."""
        return self.progress(make_ticket(ticket_id, block_ids, self.epoch), len(block_ids), tail)

    def progress(self, ticket: KVTicket, num_ready: int, tail: bytes | None = None) -> KVTicket:
        """Publish a ticket as far as its first `num_ready` blocks."""
        block_ids = ticket.block_ids[0]
        if ticket.ticket_id not in self.names or self.names[ticket.ticket_id].epoch != self.epoch:
            self.names[ticket.ticket_id] = Names(self.epoch, [name_of(self.pool, block_id) for block_id in block_ids])
        names = self.names[ticket.ticket_id].of_blocks[:num_ready]
        return self.connector.publish(ticket, Progress(block_ids[:num_ready], names, tail))

    def pull(self, ticket: KVTicket, block_ids: list[int], skip_blocks: int = 0) -> None:
        """Begin a pull, with the names of the blocks as an engine would know them from its request's tokens."""
        known = self.names[ticket.ticket_id].of_blocks if ticket.ticket_id in self.names else []
        names = known[max(0, skip_blocks) :][: len(block_ids)]
        names += [b"unknown"] * (len(block_ids) - len(names))
        self.connector.pull(ticket, block_ids, names, skip_blocks)

    def next_event(self) -> Event:
        """The next event but `Renewed`, which go to `renewed`; each must have been announced by `notify`."""
        while True:
            assert self.notified.acquire(timeout=WAIT_S), "no event"
            self.waiting += self.connector.poll()
            event = self.waiting.pop(0)
            if not isinstance(event, Renewed):
                return event
            self.renewed.append(event.ticket_id)

    def next_renewal(self) -> str:
        """The ticket of the next event, which must be `Renewed`."""
        assert self.notified.acquire(timeout=WAIT_S), "no event"
        self.waiting += self.connector.poll()
        event = self.waiting.pop(0)
        assert isinstance(event, Renewed), event
        self.renewed.append(event.ticket_id)
        return event.ticket_id

    def failure(self) -> str:
        """The cause of the next event, which must be a failed pull."""
        event = self.next_event()
        assert isinstance(event, PullFailed), event
        assert event.message
        return event.cause

    def is_quiet(self) -> bool:
        """Nothing was announced or is there that was not looked at, but `Renewed`."""
        self.waiting += self.connector.poll()
        while self.waiting and isinstance(self.waiting[0], Renewed):
            self.next_renewal()
        return not self.waiting and not self.notified.acquire(blocking=False)


class World:
    """Opens connectors of one kind that can reach each other, and closes them all."""

    def __init__(self, opener: Open) -> None:
        self._open = opener
        self._parties: list[Party] = []
        self._names: dict[str, Names] = {}

    def party(
        self,
        epoch: str = "epoch-1",
        layout: BlockLayout = LAYOUT,
        options: ConnectorOptions = OPTIONS,
        conduct: Conduct = PRODUCTION,
    ) -> Party:
        pool = KVPool(layout)
        pool.planes[:] = pattern(layout, salt=len(self._parties) + 1)
        notified = threading.Semaphore(0)
        connector = self._open(options, pool, epoch, notified.release, conduct)
        party = Party(connector, pool, epoch, notified, self._names)
        self._parties.append(party)
        return party

    def close(self) -> None:
        for party in self._parties:
            party.connector.close()
            party.pool.close()


def world_of(name: str, **extra: Any) -> World:
    """A world of a connector from the table; `extra` are options that it needs."""

    def open_named(options: ConnectorOptions, pool: KVPool, epoch: str, notify: Notify, conduct: Conduct) -> Connector:
        config = KVTransferConfig(name, kv_connector_extra_config=msgspec.structs.replace(options, **extra))
        return open_connector(config, pool, epoch, notify, conduct=conduct)

    return World(open_named)


def multi_world(second: str = "tcp", **extra: Any) -> World:
    """A world of chains: shm, and then another connector with `extra` options."""

    def open_chain(options: ConnectorOptions, pool: KVPool, epoch: str, notify: Notify, conduct: Conduct) -> Connector:
        members = (
            KVTransferConfig("shm", kv_connector_extra_config=options),
            KVTransferConfig(second, kv_connector_extra_config=msgspec.structs.replace(options, port=0, **extra)),
        )
        config = KVTransferConfig("multi", kv_connector_extra_config=ConnectorOptions(connectors=members))
        return open_connector(config, pool, epoch, notify, conduct=conduct)

    return World(open_chain)


def local_world() -> World:
    """A world of engines in one process."""
    network = LocalNetwork()

    def open_local(options: ConnectorOptions, pool: KVPool, epoch: str, notify: Notify, conduct: Conduct) -> Connector:
        return LocalConnector(network, options, pool, epoch, notify, conduct=conduct)

    return World(open_local)


def name_of(pool: KVPool, block_id: int) -> bytes:
    """A hash of a block's content, which stands for the tokens that would make it."""
    return hashlib.sha256(pool.planes[:, block_id].tobytes()).digest()


def pattern(layout: BlockLayout, salt: int) -> npt.NDArray[np.uint8]:
    """Planes whose every 32-bit word says whose it is: salt, plane, block and offset, a byte each."""
    plane, block, offset = np.indices((layout.num_planes, layout.num_blocks, layout.block_bytes // 4), dtype=np.uint32)
    words: npt.NDArray[np.uint32] = np.uint32(salt) << 24 | plane << 16 | block << 8 | offset
    return words.view(np.uint8)


def make_ticket(ticket_id: str, block_ids: list[int], epoch: str) -> KVTicket:
    """A ticket as an engine makes it, its last block partial."""
    return KVTicket(
        ticket_id=ticket_id,
        connector="",
        epoch=epoch,
        fingerprint="tiny",
        token_hash="",
        expires_at_s=0.0,
        engine_id="producer",
        request_id="request",
        host="",
        port=0,
        num_tokens=max(0, len(block_ids) * LAYOUT.block_size - 1),
        block_ids=[block_ids],
    )


def num_bytes(num_blocks: int) -> int:
    return num_blocks * LAYOUT.num_planes * LAYOUT.block_bytes
