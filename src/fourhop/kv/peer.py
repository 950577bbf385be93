"""`PeerConnector`: a connector whose peers are other processes, reached over the control channel.

How the bytes move between a claim and its confirmation is a `Mover`'s business; `shm` and `tcp` are two.
"""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec

from fourhop.kv.config import ConnectorOptions
from fourhop.kv.connector import Event, Notify, PullError, Released
from fourhop.kv.control import VERSION, Channel, Claim, Confirmed, Granted, Refused, Release
from fourhop.kv.holds import Holds, Want
from fourhop.kv.layout import KVPool
from fourhop.kv.pulls import OnStep, Outbox, Pulls, no_step
from fourhop.kv.sockets import Listener, OpenSockets
from fourhop.wire.ticket import KVTicket

logger = logging.getLogger(__name__)


class Mover(Protocol):
    """Carries the bytes of blocks from the producer's pool to the consumer's. Block lists have the same length."""

    name: str

    def grant(self, block_ids: list[int]) -> Granted:
        """Producer: the answer to a claim of these blocks."""

    def send(self, channel: Channel, block_ids: list[int]) -> None:
        """Producer: what follows the answer, if anything."""

    def receive(self, channel: Channel, granted: Granted, block_ids: list[int]) -> None:
        """Consumer: fill these blocks. Raises PullError, OSError or msgspec.DecodeError."""

    def prune(self) -> None:
        """Consumer: a peer failed; let go of what is kept of peers that are gone."""

    def close(self) -> None:
        """Let go of all that is kept between pulls."""


class PeerConnector:
    """A `Connector` over TCP conversations (see `control`)."""

    def __init__(
        self,
        mover: Mover,
        options: ConnectorOptions,
        pool: KVPool,
        epoch: str,
        notify: Notify,
        *,
        on_step: OnStep = no_step,
    ) -> None:
        self.name = mover.name
        self._mover = mover
        self._layout = pool.layout
        self._on_step = on_step
        self._holds = Holds(epoch, pool.layout.geometry())
        self._outbox = Outbox(notify)
        self._pulls = Pulls(self._outbox, options.pull_timeout_s)
        self._sockets = OpenSockets()
        self._listener = Listener(options.host, options.port, options.pull_timeout_s, self._answer)

    def publish(self, ticket: KVTicket) -> KVTicket:
        self._holds.add(ticket)
        return msgspec.structs.replace(ticket, connector=self.name, host=self._listener.host, port=self._listener.port)

    def pull(self, ticket: KVTicket, block_ids: list[int], skip_blocks: int = 0) -> None:
        target = list(block_ids)
        self._pulls.start(ticket.ticket_id, lambda deadline_s: self._pull(ticket, target, skip_blocks, deadline_s))

    def release(self, ticket_id: str) -> None:
        self._holds.withdraw(ticket_id)

    def poll(self) -> list[Event]:
        return self._outbox.take()

    def close(self) -> None:
        self._listener.close()
        self._sockets.shut()
        self._pulls.close()
        self._mover.close()

    def _pull(self, ticket: KVTicket, block_ids: list[int], skip_blocks: int, deadline_s: float) -> int:
        if ticket.connector != self.name:
            raise PullError("protocol", f"a ticket for the {ticket.connector} connector came to {self.name}")
        claim = Claim(
            connector=self.name,
            ticket_id=ticket.ticket_id,
            epoch=ticket.epoch,
            geometry=self._layout.geometry(),
            skip_blocks=skip_blocks,
            num_blocks=len(block_ids),
        )
        try:
            with self._sockets.connect(ticket.host, ticket.port, deadline_s) as channel:
                granted = channel.ask(claim, Granted)
                self._on_step("claimed", ticket.ticket_id)
                self._mover.receive(channel, granted, block_ids)
                self._on_step("copied", ticket.ticket_id)
                channel.ask(Release(), Confirmed)
        except OSError:
            self._mover.prune()
            raise
        return len(block_ids) * self._layout.num_planes * self._layout.block_bytes

    def _answer(self, channel: Channel) -> None:
        """The producer's side of one conversation."""
        claim = channel.receive(Claim)
        try:
            block_ids = self._claim(claim)
            channel.send(self._mover.grant(block_ids))
            self._mover.send(channel, block_ids)
            channel.receive(Release)
            self._holds.confirm(claim.ticket_id)
        except PullError as refusal:
            logger.info("KV ticket %s refused: %s", claim.ticket_id, refusal.message)
            channel.send(Refused(refusal.cause, refusal.message))
            return
        self._outbox.put(Released(claim.ticket_id))
        channel.send(Confirmed())

    def _claim(self, claim: Claim) -> list[int]:
        if (claim.version, claim.connector) != (VERSION, self.name):
            raise PullError(
                "protocol",
                f"a claim of {claim.connector} version {claim.version} came to {self.name} version {VERSION}",
            )
        want = Want(claim.ticket_id, claim.epoch, claim.geometry, claim.skip_blocks, claim.num_blocks)
        return self._holds.claim(want)
