"""`local`: engines in one process. The semantics of the other connectors without a socket between."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from fourhop.kv.config import ConnectorOptions
from fourhop.kv.connector import Event, Notify, Progress, Pulled, PullError, Released, Renewed
from fourhop.kv.holds import Holds, Want
from fourhop.kv.layout import KVPool, runs
from fourhop.kv.pulls import PRODUCTION, Conduct, Outbox, Pull, Pulls
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

    def find(self, port: int) -> LocalConnector | None:
        with self._lock:
            return self._peers.get(port)


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
        conduct: Conduct = PRODUCTION,
    ) -> None:
        self.pool = pool
        self.epoch = epoch
        self.holds = Holds(epoch, pool.layout)
        self.outbox = Outbox(notify)
        self._pulls = Pulls(self.outbox, options.pull_timeout_s, conduct)
        self._conduct = conduct
        self._network = network
        self._port = network.join(self, options.port)

    def publish(self, ticket: KVTicket, progress: Progress) -> KVTicket:
        self.holds.publish(ticket, progress)
        return msgspec.structs.replace(ticket, connector=self.name, host="local", port=self._port)

    def pull(self, ticket: KVTicket, block_ids: list[int], names: list[bytes], skip_blocks: int = 0) -> None:
        want = Want(ticket.ticket_id, ticket.epoch, self.pool.layout.geometry(), skip_blocks, len(block_ids))
        target = list(block_ids)
        self._pulls.start(ticket, lambda pull: self._pull(pull, want, target))

    def release(self, ticket_id: str) -> None:
        self.holds.withdraw(ticket_id)
        ticket = self._pulls.cancel(ticket_id)
        peer = None if ticket is None else self._producer_of(ticket)
        if peer is not None:
            peer.let_go(ticket_id)

    def renew(self, ticket: KVTicket) -> None:
        peer = self._producer_of(ticket)
        if peer is not None and peer.holds.stands(ticket.ticket_id):
            peer.outbox.put(Renewed(ticket.ticket_id))

    def poll(self) -> list[Event]:
        return self.outbox.take()

    def close(self) -> None:
        self._network.leave(self._port, self)
        self.holds.close()
        self._pulls.close()

    def let_go(self, ticket_id: str) -> None:
        """End a ticket whose consumer wants it no more."""
        if self.holds.decline(ticket_id):
            self.outbox.put(Released(ticket_id))

    def _producer_of(self, ticket: KVTicket) -> LocalConnector | None:
        """Whoever issued a ticket, in the same life; None when that is over."""
        peer = self._network.find(ticket.port)
        return peer if peer is not None and peer.epoch == ticket.epoch else None

    def _pull(self, pull: Pull, want: Want, target: list[int]) -> Pulled:
        ticket = pull.ticket
        if ticket.connector != self.name:
            raise PullError("protocol", f"a ticket for the {ticket.connector} connector came to {self.name}")
        peer = self._network.find(ticket.port)
        if peer is None:
            raise PullError("unreachable", f"no engine of this process has KV port {ticket.port}")
        peer.holds.claim(want)
        try:
            with pull.stopping(partial(peer.let_go, want.ticket_id)):
                return self._take(peer, want, target)
        finally:
            peer.let_go(want.ticket_id)

    def _take(self, peer: LocalConnector, want: Want, target: list[int]) -> Pulled:
        """Copy the blocks of a claimed ticket as they become ready, and confirm them."""
        ticket_id, num_copied, tail = want.ticket_id, 0, b""
        peer.outbox.put(Renewed(ticket_id))
        self._conduct.on_step("claimed", ticket_id)
        for step in peer.holds.steps(want, self._conduct.keep_alive_s):
            peer.outbox.put(Renewed(ticket_id))
            self._conduct.on_step("ready", ticket_id)
            self._copy(peer.pool, step.block_ids, target[num_copied : num_copied + len(step.block_ids)])
            num_copied += len(step.block_ids)
            tail = step.tail or b""
        self._conduct.on_step("copied", ticket_id)
        peer.holds.confirm(ticket_id)
        peer.outbox.put(Released(ticket_id))
        return Pulled(ticket_id, num_copied * self.pool.layout.num_planes * self.pool.layout.block_bytes, tail)

    def _copy(self, pool: KVPool, source: list[int], target: list[int]) -> None:
        for src, dst, length in runs(source, target):
            np.copyto(self.pool.planes[:, dst : dst + length], pool.planes[:, src : src + length])
