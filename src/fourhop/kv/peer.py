"""`PeerConnector`: a connector whose peers are other processes, reached over the control channel.

How the bytes move between a claim and its confirmation is a `Mover`'s business; `shm` and `tcp` are two.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from typing import Protocol

import msgspec

from fourhop.kv.addresses import peers_of
from fourhop.kv.config import ConnectorOptions
from fourhop.kv.connector import Event, Notify, Progress, Pulled, PullError, Released, Renewed
from fourhop.kv.control import (
    VERSION,
    Channel,
    Claim,
    Confirmed,
    Decline,
    Granted,
    More,
    Ready,
    Refused,
    Release,
    Renew,
)
from fourhop.kv.holds import Holds, Want
from fourhop.kv.layout import KVPool
from fourhop.kv.notes import Note, Notes
from fourhop.kv.pulls import PRODUCTION, Conduct, Outbox, Pull, Pulls
from fourhop.kv.sockets import Listener, OpenSockets, shut, socket_for
from fourhop.wire.ticket import KVTicket

logger = logging.getLogger(__name__)


class Mover(Protocol):
    """Carries the bytes of blocks from the producer's pool to the consumer's. Block lists have the same length."""

    name: str

    def grant(self) -> Granted:
        """Producer: the answer to a claim."""

    def send(self, channel: Channel, block_ids: list[int]) -> None:
        """Producer: what follows a Ready of these blocks, if anything."""

    def receive(self, channel: Channel, granted: Granted, source: list[int], target: list[int]) -> None:
        """Consumer: fill blocks, as many as are ready. Raises PullError, OSError or msgspec.DecodeError."""

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
        conduct: Conduct = PRODUCTION,
    ) -> None:
        self.name = mover.name
        self._mover = mover
        self._layout = pool.layout
        self._epoch = epoch
        self._timeout_s = options.pull_timeout_s
        self._checksum = options.checksum
        self._conduct = conduct
        self._holds = Holds(epoch, pool.layout)
        self._outbox = Outbox(notify)
        self._pulls = Pulls(self._outbox, options.pull_timeout_s, conduct)
        self._notes = Notes(self._send_note)
        self._sockets = OpenSockets()
        self._listener = Listener(options.host, options.port, options.pull_timeout_s, self._answer)
        self._peers = peers_of(options, self._listener.host)

    def publish(self, ticket: KVTicket, progress: Progress) -> KVTicket:
        self._holds.publish(ticket, progress)
        return msgspec.structs.replace(ticket, connector=self.name, host=self._listener.host, port=self._listener.port)

    def pull(self, ticket: KVTicket, block_ids: list[int], names: list[bytes], skip_blocks: int = 0) -> None:
        claim = Claim(
            connector=self.name,
            ticket_id=ticket.ticket_id,
            epoch=ticket.epoch,
            geometry=self._layout.geometry(),
            skip_blocks=skip_blocks,
            num_blocks=len(block_ids),
            checksum=self._checksum,
        )
        target = list(block_ids)
        self._pulls.start(ticket, lambda pull: self._pull(pull, claim, target))

    def release(self, ticket_id: str) -> None:
        self._holds.withdraw(ticket_id)
        ticket = self._pulls.cancel(ticket_id)
        if ticket is not None:
            self._notes.post(ticket, Decline(ticket_id, ticket.epoch))

    def renew(self, ticket: KVTicket) -> None:
        self._notes.post(ticket, Renew(ticket.ticket_id, ticket.epoch))

    def poll(self) -> list[Event]:
        return self._outbox.take()

    def close(self) -> None:
        self._holds.close()
        self._listener.close()
        self._sockets.shut()
        self._pulls.close()
        self._notes.close()
        self._mover.close()

    # The consumer's side of a conversation.

    def _pull(self, pull: Pull, claim: Claim, target: list[int]) -> Pulled:
        ticket = pull.ticket
        if ticket.connector != self.name:
            raise PullError("protocol", f"a ticket for the {ticket.connector} connector came to {self.name}")
        try:
            with self._channel(ticket, pull) as channel:
                channel.has_sums = claim.checksum
                granted = channel.ask(claim, Granted)
                self._conduct.on_step("claimed", ticket.ticket_id)
                tail = self._copy(channel, granted, ticket.ticket_id, target)
                self._conduct.on_step("copied", ticket.ticket_id)
                channel.ask(Release(), Confirmed)
        except OSError:
            self._mover.prune()
            raise
        return Pulled(ticket.ticket_id, len(target) * self._layout.num_planes * self._layout.block_bytes, tail)

    def _copy(self, channel: Channel, granted: Granted, ticket_id: str, target: list[int]) -> bytes:
        """Fill the target blocks as their contents become ready; returns the ticket's tail."""
        num_copied = 0
        ready = channel.expect(Ready)
        while True:
            self._conduct.on_step("ready", ticket_id)
            blocks = target[num_copied : num_copied + len(ready.block_ids)]
            num_copied += len(ready.block_ids)
            if num_copied > len(target) or (ready.tail is not None and num_copied < len(target)):
                raise PullError("protocol", "the producer gives other blocks than were asked for")
            self._mover.receive(channel, granted, ready.block_ids, blocks)
            if ready.tail is not None:
                return ready.tail
            ready = channel.ask(More(), Ready)

    @contextlib.contextmanager
    def _channel(self, ticket: KVTicket, pull: Pull) -> Iterator[Channel]:
        """A connection to a ticket's producer that ends with `pull` or with this connector."""
        sock = socket_for(ticket.host, ticket.port, self._peers)
        with self._sockets.holding(sock), pull.stopping(partial(shut, sock)):
            channel = Channel(sock, self._timeout_s, self._conduct.clock)
            channel.connect(ticket.host, ticket.port)
            pull.check()  # a socket cannot be shut before it is connected
            self._sockets.check()
            yield channel

    def _send_note(self, ticket: KVTicket, note: Note) -> None:
        with self._channel(ticket, Pull(ticket)) as channel:
            channel.send(note)

    # The producer's side.

    def _answer(self, channel: Channel) -> None:
        match channel.receive_opening():
            case Claim() as claim:
                self._answer_claim(channel, claim)
            case Renew(ticket_id, epoch) if epoch == self._epoch and self._holds.stands(ticket_id):
                self._outbox.put(Renewed(ticket_id))
            case Decline(ticket_id, epoch) if epoch == self._epoch:
                self._let_go(ticket_id)

    def _answer_claim(self, channel: Channel, claim: Claim) -> None:
        try:
            want = self._claim(claim)
        except PullError as refusal:
            self._refuse(channel, claim, refusal)
            return
        channel.has_sums = claim.checksum
        try:
            self._hand_over(channel, want)
        except PullError as refusal:
            self._refuse(channel, claim, refusal)
        finally:
            self._let_go(claim.ticket_id)

    def _claim(self, claim: Claim) -> Want:
        if (claim.version, claim.connector) != (VERSION, self.name):
            raise PullError(
                "protocol",
                f"a claim of {claim.connector} version {claim.version} came to {self.name} version {VERSION}",
            )
        want = Want(claim.ticket_id, claim.epoch, claim.geometry, claim.skip_blocks, claim.num_blocks)
        self._holds.claim(want)
        return want

    def _hand_over(self, channel: Channel, want: Want) -> None:
        """Serve a claimed ticket. Raises PullError when it ends before the consumer has all of it."""
        self._outbox.put(Renewed(want.ticket_id))
        channel.send(self._mover.grant())
        for block_ids, tail in self._holds.steps(want, self._conduct.keep_alive_s):
            self._outbox.put(Renewed(want.ticket_id))
            channel.send(Ready(block_ids, tail))
            self._mover.send(channel, block_ids)
            if tail is None:
                channel.receive(More)
        channel.receive(Release)
        self._holds.confirm(want.ticket_id)
        self._outbox.put(Released(want.ticket_id))
        channel.send(Confirmed())

    def _refuse(self, channel: Channel, claim: Claim, refusal: PullError) -> None:
        logger.info("KV ticket %s refused: %s", claim.ticket_id, refusal.message)
        channel.send(Refused(refusal.cause, refusal.message))

    def _let_go(self, ticket_id: str) -> None:
        """End a ticket whose consumer wants it no more, or is gone."""
        if self._holds.decline(ticket_id):
            self._outbox.put(Released(ticket_id))
