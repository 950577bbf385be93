"""The producer's table of published tickets: who may take which blocks, and that nobody takes them twice or too late.

    add ──▶ published ──claim──▶ claimed ──confirm──▶ ended (used)
                └───────withdraw─────┴──────────────▶ ended (withdrawn)

A consumer reads blocks between `claim` and `confirm`. Because `confirm` succeeds only while the hold still stands,
blocks that were recycled under a reader are never taken for good ones, however late the read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from fourhop.kv.connector import PullError
from fourhop.kv.layout import GEOMETRY
from fourhop.wire.ticket import KVTicket

NUM_ENDED_REMEMBERED = 4096
"""Ended tickets that are remembered so that a late claim is told why; older ones are `unknown_ticket`."""


@dataclass(frozen=True)
class Want:
    """What a consumer asks for: a ticket, under which boot id and geometry, and how many of its last blocks."""

    ticket_id: str
    epoch: str
    geometry: tuple[int, ...]
    skip_blocks: int
    num_blocks: int


@dataclass
class _Hold:
    block_ids: list[int]
    claimed: bool = False


@dataclass
class Holds:
    """Thread-safe: the engine adds and withdraws, the connector's threads claim and confirm."""

    epoch: str
    geometry: tuple[int, ...]
    _standing: dict[str, _Hold] = field(default_factory=dict)
    _ended: OrderedDict[str, str] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, ticket: KVTicket) -> None:
        """Let a ticket be claimed once. Raises ValueError when it cannot be ours: a second one, or several groups."""
        (block_ids,) = ticket.block_ids
        with self._lock:
            if ticket.ticket_id in self._standing or ticket.ticket_id in self._ended:
                raise ValueError(f"ticket {ticket.ticket_id} was published before")
            self._standing[ticket.ticket_id] = _Hold(list(block_ids))

    def claim(self, want: Want) -> list[int]:
        """The blocks to copy, in order. Raises PullError; a refused claim leaves the ticket as it was."""
        if want.epoch != self.epoch:
            raise PullError("epoch", "the engine that issued this ticket has restarted")
        with self._lock:
            hold = self._find(want.ticket_id)
            self._check_shape(want, hold)
            if hold.claimed:
                raise PullError("used", f"ticket {want.ticket_id} was claimed before")
            hold.claimed = True
            return hold.block_ids[want.skip_blocks :]

    def confirm(self, ticket_id: str) -> None:
        """End a claimed ticket whose blocks were copied. Raises PullError("withdrawn") if it ended meanwhile."""
        with self._lock:
            self._find(ticket_id)
            self._end(ticket_id, "used")

    def withdraw(self, ticket_id: str) -> None:
        """End a ticket at once; unknown ones are ignored."""
        with self._lock:
            if ticket_id in self._standing:
                self._end(ticket_id, "withdrawn")

    def _find(self, ticket_id: str) -> _Hold:
        if ticket_id in self._standing:
            return self._standing[ticket_id]
        cause = self._ended.get(ticket_id, "unknown_ticket")
        raise PullError(cause, f"ticket {ticket_id} is not held by the producer ({cause})")

    def _check_shape(self, want: Want, hold: _Hold) -> None:
        if want.geometry != self.geometry:
            raise PullError("layout", describe_difference(self.geometry, want.geometry))
        num_left = len(hold.block_ids) - want.skip_blocks
        if want.skip_blocks < 0 or num_left != want.num_blocks:
            raise PullError(
                "protocol", f"{want.num_blocks} blocks wanted after {want.skip_blocks} of {len(hold.block_ids)}"
            )

    def _end(self, ticket_id: str, cause: str) -> None:
        del self._standing[ticket_id]
        self._ended[ticket_id] = cause
        while len(self._ended) > NUM_ENDED_REMEMBERED:
            self._ended.popitem(last=False)


def describe_difference(producer: tuple[int, ...], consumer: tuple[int, ...]) -> str:
    """Name the numbers that differ between two geometries of equal length."""
    pairs = zip(GEOMETRY, producer, consumer, strict=True)
    return "; ".join(f"{name}: producer {a}, consumer {b}" for name, a, b in pairs if a != b)
