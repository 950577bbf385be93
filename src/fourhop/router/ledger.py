"""The ledger of holds: every ticket is owned from the moment it can exist until it is pulled, released or expired.

A hold is asked for when a prefill leg is sent, and known by that leg's own request id: if the answer is lost on the
way back, an abort of that id still frees the blocks. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

ASKED_LEASE_S = 120.0
"""How long a hold may last whose ticket we never saw. Longer than any engine's lease."""


class HoldState(StrEnum):
    ASKED = "asked"
    ISSUED = "issued"
    PULLED = "pulled"
    RELEASED = "released"
    EXPIRED = "expired"
    NEVER_HELD = "never_held"


NEXT: dict[HoldState, frozenset[HoldState]] = {
    HoldState.ASKED: frozenset({HoldState.ISSUED, HoldState.RELEASED, HoldState.EXPIRED, HoldState.NEVER_HELD}),
    HoldState.ISSUED: frozenset({HoldState.PULLED, HoldState.RELEASED, HoldState.EXPIRED}),
    HoldState.PULLED: frozenset(),
    HoldState.RELEASED: frozenset(),
    HoldState.EXPIRED: frozenset(),
    HoldState.NEVER_HELD: frozenset(),
}


@dataclass
class Hold:
    """Blocks that one engine keeps, or may keep, for another. `is_leaked` means that its release failed."""

    request_id: str
    engine: str
    expires_at_s: float
    ticket_id: str | None = None
    state: HoldState = HoldState.ASKED
    is_leaked: bool = False

    @property
    def is_owed(self) -> bool:
        """True while the engine may be keeping blocks that nobody has taken or given back."""
        return bool(NEXT[self.state])

    @property
    def ids(self) -> list[str]:
        """What the engine may know it by."""
        return [self.request_id] if self.ticket_id is None else [self.ticket_id, self.request_id]


class Ledger:
    """All holds that are owed, and how many ended in which way."""

    def __init__(self) -> None:
        self.owed: dict[str, Hold] = {}
        self.ended: Counter[HoldState] = Counter()

    def ask(self, request_id: str, engine: str, now_s: float) -> Hold:
        """A prefill leg is about to be sent. `request_id` is the leg's own and unique."""
        hold = Hold(request_id, engine, expires_at_s=now_s + ASKED_LEASE_S)
        self.owed[request_id] = hold
        return hold

    def issue(self, hold: Hold, ticket_id: str, expires_at_s: float) -> None:
        self._move(hold, HoldState.ISSUED)
        hold.ticket_id, hold.expires_at_s = ticket_id, expires_at_s

    def end(self, hold: Hold, state: HoldState) -> None:
        """A hold ended. What has ended already stays as it was: a release may be confirmed after the expiry."""
        if hold.is_owed:
            self._move(hold, state)
            del self.owed[hold.request_id]
            self.ended[state] += 1

    def expire(self, now_s: float) -> None:
        """End every hold whose lease is over: its engine has freed the blocks by itself."""
        for hold in [hold for hold in self.owed.values() if hold.expires_at_s <= now_s]:
            self.end(hold, HoldState.EXPIRED)

    @property
    def num_leaked(self) -> int:
        """Holds that nobody wants and whose engine could not be told: 0 whenever every engine answers."""
        return sum(hold.is_leaked for hold in self.owed.values())

    def _move(self, hold: Hold, state: HoldState) -> None:
        if state not in NEXT[hold.state]:
            raise ValueError(f"a hold cannot go from {hold.state} to {state}")
        hold.state = state
