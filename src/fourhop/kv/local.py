"""`local`: engines in one process. The semantics of the other connectors without a socket between."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import msgspec
import numpy as np

from fourhop.kv.config import ConnectorOptions
from fourhop.kv.connector import Event, Notify, PullError, Released
from fourhop.kv.holds import Holds, Want
from fourhop.kv.layout import KVPool, runs
from fourhop.kv.pulls import OnStep, Outbox, Pulls, no_step
from fourhop.wire.errors import StartError
from fourhop.wire.ticket import KVTicket


@dataclass
class LocalNetwork:
    """Which connector listens at which port: what the operating system is to sockets. Given to all who shall meet."""

    _peers: dict[int, LocalConnector] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def join(self, peer: LocalConnector, port: int) -> int:
        """Listen at `port`, or at a free one if it is 0. Raises StartError when it is taken."""
        with self._lock:
            if port in self._peers:
                raise StartError(f"KV port {port} is in use")
            chosen = port or max(self._peers, default=0) + 1
            self._peers[chosen] = peer
            return chosen

    def leave(self, port: int, peer: LocalConnector) -> None:
        with self._lock:
            if self._peers.get(port) is peer:
                del self._peers[port]

    def find(self, port: int) -> LocalConnector:
        """Raises PullError("unreachable")."""
        with self._lock:
            if port not in self._peers:
                raise PullError("unreachable", f"no engine of this process has KV port {port}")
            return self._peers[port]


class LocalConnector:
    """A `Connector` whose peers are those of its `LocalNetwork`."""

    name = "local"

    def __init__(
        self,
        network: LocalNetwork,
        options: ConnectorOptions,
        pool: KVPool,
        epoch: str,
        notify: Notify,
        *,
        on_step: OnStep = no_step,
    ) -> None:
        self.pool = pool
        self.holds = Holds(epoch, pool.layout.geometry())
        self.outbox = Outbox(notify)
        self._pulls = Pulls(self.outbox, options.pull_timeout_s)
        self._on_step = on_step
        self._network = network
        self._port = network.join(self, options.port)

    def publish(self, ticket: KVTicket) -> KVTicket:
        self.holds.add(ticket)
        return msgspec.structs.replace(ticket, connector=self.name, host="local", port=self._port)

    def pull(self, ticket: KVTicket, block_ids: list[int], skip_blocks: int = 0) -> None:
        want = Want(ticket.ticket_id, ticket.epoch, self.pool.layout.geometry(), skip_blocks, len(block_ids))
        target = list(block_ids)
        self._pulls.start(ticket.ticket_id, lambda deadline_s: self._pull(ticket, want, target, deadline_s))

    def release(self, ticket_id: str) -> None:
        self.holds.withdraw(ticket_id)

    def poll(self) -> list[Event]:
        return self.outbox.take()

    def close(self) -> None:
        self._network.leave(self._port, self)
        self._pulls.close()

    def _pull(self, ticket: KVTicket, want: Want, target: list[int], deadline_s: float) -> int:
        if ticket.connector != self.name:
            raise PullError("protocol", f"a ticket for the {ticket.connector} connector came to {self.name}")
        peer = self._network.find(ticket.port)
        source = peer.holds.claim(want)
        self._on_step("claimed", ticket.ticket_id)
        for src, dst, length in runs(source, target):
            if time.monotonic() > deadline_s:
                raise TimeoutError
            np.copyto(self.pool.planes[:, dst : dst + length], peer.pool.planes[:, src : src + length])
        self._on_step("copied", ticket.ticket_id)
        if self._network.find(ticket.port) is not peer:
            raise PullError("unreachable", "the producer closed during the pull")
        peer.holds.confirm(ticket.ticket_id)
        peer.outbox.put(Released(ticket.ticket_id))
        return len(target) * self.pool.layout.num_planes * self.pool.layout.block_bytes
