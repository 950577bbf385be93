"""The ledger of holds: every ticket is owned from the moment it can exist until it is pulled, released or expired.

A hold is asked for before the request that may make it is sent, and known by an id of our own: if the answer is lost on
the way back, an abort of that id still frees the blocks. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fourhop.router.handoff.protocol import Handle
from fourhop.wire.worker import Lease, Leases

ASKED_LEASE_S = 120.0
"""How long a hold may last whose ticket we never saw. Longer than any engine's lease."""

RENEW_AT = 1 / 3
"""A lease is renewed when this part of it is over, so that two renewals may fail."""


class HoldState(StrEnum):
    ASKED = "asked"
    ISSUED = "issued"
    PULLED = "pulled"
    RELEASED = "released"
    EXPIRED = "expired"
    NEVER_HELD = "never_held"
    LOST = "lost"  # its engine started anew


NEXT: dict[HoldState, frozenset[HoldState]] = {
    HoldState.ASKED: frozenset(
        {HoldState.ISSUED, HoldState.RELEASED, HoldState.EXPIRED, HoldState.NEVER_HELD, HoldState.LOST}
    ),
    HoldState.ISSUED: frozenset({HoldState.PULLED, HoldState.RELEASED, HoldState.EXPIRED, HoldState.LOST}),
    HoldState.PULLED: frozenset(),
    HoldState.RELEASED: frozenset(),
    HoldState.EXPIRED: frozenset(),
    HoldState.NEVER_HELD: frozenset(),
    HoldState.LOST: frozenset(),
}


@dataclass(eq=False)
class Hold:
    """Blocks that one engine, in one of its lives, keeps or may keep for another.

    `ticket` is the newest there is, as transfer parameters. `is_taken` while an engine has it and keeps the lease alive
    itself. `is_left` when nobody wants it any more, `is_leaked` when its engine could not be told so. For `send_by_s`
    and `is_freed_by_refusal` see `handoff.protocol.Handle`.
    """

    request_id: str
    engine: str
    epoch: str
    expires_at_s: float
    lease_s: float = ASKED_LEASE_S
    ticket: dict[str, Any] | None = None
    ticket_id: str | None = None
    send_by_s: float | None = None
    is_freed_by_refusal: bool = False
    state: HoldState = HoldState.ASKED
    is_taken: bool = False
    is_left: bool = False
    is_leaked: bool = False

    @property
    def is_owed(self) -> bool:
        """True while the engine may be keeping blocks that nobody has taken or given back."""
        return bool(NEXT[self.state])

    @property
    def only_expires(self) -> bool:
        """True if its engine can neither renew it nor be told of it."""
        return self.send_by_s is not None

    @property
    def can_be_released(self) -> bool:
        """What was sent to a decode engine is that one's to give back: it may be reading."""
        return not self.only_expires or (self.is_freed_by_refusal and not self.is_taken)

    def is_spent(self, now_s: float) -> bool:
        """True for a handle that works once and was sent, or is too old to be."""
        return self.send_by_s is not None and (self.is_taken or now_s >= self.send_by_s)

    @property
    def ids(self) -> list[str]:
        """What the engine may know it by."""
        return [self.request_id] if self.ticket_id is None else [self.ticket_id, self.request_id]

    def is_due(self, now_s: float) -> bool:
        """True if the router is the one to renew the lease, and the time for it has come."""
        is_ours = self.state is HoldState.ISSUED and not self.is_taken and not self.is_left and not self.only_expires
        return is_ours and now_s >= self.expires_at_s - self.lease_s * (1 - RENEW_AT)


class Ledger:
    """All holds that are owed, and how many ended in which way."""

    def __init__(self) -> None:
        self.owed: dict[str, Hold] = {}
        self.ended: Counter[HoldState] = Counter()

    def ask(self, request_id: str, engine: str, epoch: str, now_s: float) -> Hold:
        """Something that may hold is about to be sent. `request_id` is the router's own and unique."""
        hold = Hold(request_id, engine, epoch, expires_at_s=now_s + ASKED_LEASE_S)
        self.owed[request_id] = hold
        return hold

    def issue(self, hold: Hold, handle: Handle, now_s: float) -> None:
        self._move(hold, HoldState.ISSUED)
        hold.ticket, hold.ticket_id = handle.params, handle.handle_id
        hold.epoch = hold.epoch if handle.epoch is None else handle.epoch
        hold.expires_at_s, hold.lease_s = handle.expires_at_s, handle.expires_at_s - now_s
        hold.send_by_s, hold.is_freed_by_refusal = handle.send_by_s, handle.is_freed_by_refusal

    def renew(self, hold: Hold, ticket: dict[str, Any], now_s: float) -> None:
        """The engine began a new lease, and dated the ticket anew."""
        hold.ticket = ticket
        hold.expires_at_s = now_s + hold.lease_s

    def end(self, hold: Hold, state: HoldState) -> None:
        """A hold ended. What has ended already stays as it was: a release may be confirmed after the expiry."""
        if hold.is_owed:
            self._move(hold, state)
            del self.owed[hold.request_id]
            self.ended[state] += 1

    def expire(self, now_s: float) -> None:
        """End what nobody wants and whose lease is over: its engine has freed the blocks by itself.

        A hold that is wanted is not ended by our clock: its engine, or the pull, tells when it is gone.
        """
        for hold in [hold for hold in self.owed.values() if hold.is_left and hold.expires_at_s <= now_s]:
            self.end(hold, HoldState.EXPIRED)

    def at(self, engine: str) -> list[Hold]:
        return [hold for hold in self.owed.values() if hold.engine == engine]

    def forget_old(self, engine: str, epoch: str) -> None:
        """The engine lives under `epoch`: what it held before is gone.

        What is asked for and wanted stays: the request may have reached the new life before we knew of it.
        """
        for hold in self.at(engine):
            is_open = hold.state is HoldState.ASKED and not hold.is_left
            if hold.epoch != epoch and not is_open:
                self.end(hold, HoldState.LOST)

    def strays(self, listed: Leases, prefix: str) -> list[Lease]:
        """The leases of an engine that are ours, by the prefix of their request ids, and that we know nothing of."""
        return [
            lease
            for lease in listed.leases
            if lease.request_id.startswith(prefix) and lease.request_id not in self.owed
        ]

    @property
    def num_leaked(self) -> int:
        """Holds that nobody wants and whose engine could not be told: 0 whenever every engine answers."""
        return sum(hold.is_leaked for hold in self.owed.values())

    def due(self, now_s: float) -> Sequence[Hold]:
        """Holds whose leases the router is to renew."""
        return [hold for hold in self.owed.values() if hold.is_due(now_s)]

    def _move(self, hold: Hold, state: HoldState) -> None:
        if state not in NEXT[hold.state]:
            raise ValueError(f"a hold cannot go from {hold.state} to {state}")
        hold.state = state
