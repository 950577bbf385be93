"""The producer's side of hand-overs: tickets that this engine issued, and until when it keeps their blocks."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from fourhop.engine.sequence import Sequence, block_names
from fourhop.kv.connector import Connector, Progress
from fourhop.wire.ticket import FirstToken, KVTicket, hash_tokens, sign
from fourhop.wire.worker import Lease


@dataclass(frozen=True)
class Identity:
    """Who this engine is: `epoch` is new at every start, `fingerprint` says whose KV it can use."""

    engine_id: str
    epoch: str
    fingerprint: str


@dataclass
class _Issued:
    """A ticket and its sequence. `deadline_s` is None until all its KV exists: what is being computed is not late."""

    ticket: KVTicket
    sequence: Sequence
    num_published: int = 0
    deadline_s: float | None = None


class HoldLedger:
    """Issues a ticket for every hold and ends each once: pulled, withdrawn, or expired.

    A lease lasts `lease_s` seconds from its last renewal. A ticket is issued whole (`issue`), or early (`open`, then
    `extend`, then `issue`) so that blocks travel while the rest is computed.
    """

    def __init__(
        self,
        connector: Connector,
        identity: Identity,
        *,
        block_size: int,
        lease_s: float,
        secret: str,
        wall_clock: Callable[[], float],
    ) -> None:
        self.identity = identity
        self.num_expired = 0
        self._connector = connector
        self._block_size = block_size
        self._lease_s = lease_s
        self._secret = secret
        self._wall_clock = wall_clock
        self._issued: dict[str, _Issued] = {}

    def open(self, sequence: Sequence) -> KVTicket:
        """A ticket for all tokens that the sequence has, before their KV exists."""
        return self._publish(self._new(sequence, sequence.num_tokens, None), Progress([], []))

    def extend(self, sequence: Sequence) -> None:
        """Let the blocks travel that became full since the last call."""
        issued = self._issued.get(sequence.held_as)
        num_final = sequence.num_computed // self._block_size
        if issued is not None and num_final > issued.num_published:
            issued.num_published = num_final
            names = block_names(sequence, num_final * self._block_size, self._block_size)
            self._connector.publish(issued.ticket, Progress(sequence.blocks[:num_final], names))

    def issue(self, sequence: Sequence, first: FirstToken | None, now_s: float) -> KVTicket:
        """A whole ticket for what a held sequence has computed, or the end of one that was opened.

        `first` is the token sampled after that; None if the consumer brings its own.
        """
        issued = self._issued.get(sequence.held_as) or self._new(sequence, sequence.num_computed, first)
        issued.deadline_s = now_s + self._lease_s
        issued.ticket = self._dated(issued.ticket)
        tail = b"" if first is None else msgspec.msgpack.encode(first)
        names = block_names(sequence, issued.ticket.num_tokens, self._block_size)
        return self._publish(issued, Progress(sequence.blocks[: len(names)], names, tail))

    def withdraw(self, ticket_id: str) -> None:
        """Make a ticket worthless. Its blocks may be reused when this returns."""
        if self._issued.pop(ticket_id, None) is not None:
            self._connector.release(ticket_id)

    def forget(self, ticket_id: str) -> None:
        """A ticket was pulled."""
        self._issued.pop(ticket_id, None)

    def renew(self, ticket_ids: list[str], now_s: float) -> list[KVTicket]:
        """Begin new leases; returns the tickets that are known, with their new expiry."""
        known = [self._issued[ticket_id] for ticket_id in ticket_ids if ticket_id in self._issued]
        for issued in known:
            if issued.deadline_s is not None:
                issued.deadline_s = now_s + self._lease_s
            issued.ticket = self._dated(issued.ticket)
        return [sign(issued.ticket, self._secret) for issued in known]

    def expire(self, now_s: float) -> list[str]:
        """Withdraw the tickets whose lease is over; returns their ids."""
        late = [
            ticket_id
            for ticket_id, issued in self._issued.items()
            if issued.deadline_s is not None and issued.deadline_s <= now_s
        ]
        for ticket_id in late:
            self.withdraw(ticket_id)
        self.num_expired += len(late)
        return late

    def next_expiry_in_s(self, now_s: float) -> float | None:
        deadlines = [issued.deadline_s for issued in self._issued.values() if issued.deadline_s is not None]
        return max(0.0, min(deadlines) - now_s) if deadlines else None

    def leases(self, now_s: float) -> list[Lease]:
        return [
            Lease(
                ticket_id=ticket_id,
                request_id=issued.sequence.request_id,
                num_tokens=issued.ticket.num_tokens,
                num_blocks=len(issued.sequence.blocks),
                expires_in_s=None if issued.deadline_s is None else issued.deadline_s - now_s,
            )
            for ticket_id, issued in self._issued.items()
        ]

    def _dated(self, ticket: KVTicket) -> KVTicket:
        """The ticket as of now: whoever is handed it has a whole lease to come."""
        return msgspec.structs.replace(ticket, expires_at_s=self._wall_clock() + self._lease_s)

    def _new(self, sequence: Sequence, num_tokens: int, first: FirstToken | None) -> _Issued:
        ticket = KVTicket(
            ticket_id=secrets.token_hex(16),
            connector=self._connector.name,
            epoch=self.identity.epoch,
            fingerprint=self.identity.fingerprint,
            token_hash=hash_tokens(sequence.token_ids[:num_tokens]),
            expires_at_s=self._wall_clock() + self._lease_s,
            engine_id=self.identity.engine_id,
            request_id=sequence.request_id,
            host="",
            port=0,
            num_tokens=num_tokens,
            block_ids=[],
            cached_tokens=sequence.num_cached or 0,
            first_token=first,
        )
        issued = _Issued(ticket, sequence)
        self._issued[ticket.ticket_id] = issued
        sequence.held_as = ticket.ticket_id
        return issued

    def _publish(self, issued: _Issued, progress: Progress) -> KVTicket:
        """Say how far a ticket is; returns it signed, and with the blocks that are known."""
        ticket = self._connector.publish(issued.ticket, progress)
        if progress.tail is not None:
            ticket = msgspec.structs.replace(ticket, block_ids=[list(progress.block_ids)])
        issued.ticket = ticket
        return sign(ticket, self._secret)
