"""The producer's table of published tickets: who may take which blocks, and that nobody takes them twice or too late.

    publish ──▶ standing ──claim──▶ claimed ──confirm──▶ ended (used)
     again ◀──┘  │   └────decline─────┴──────────────▶ ended (used)
                 └────────withdraw────┴──────────────▶ ended (withdrawn)

A ticket gains blocks while it stands, claimed or not; `steps` follows them. A consumer reads blocks between `claim` and
`confirm`. Because `confirm` succeeds only while the hold still stands, blocks that were recycled under a reader are
never taken for good ones, however late the read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from fourhop.kv.connector import MAX_TAIL_BYTES, Progress, PullError
from fourhop.kv.layout import GEOMETRY, BlockLayout
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


class Step(NamedTuple):
    """The next blocks that are ready, perhaps none, and with the last of them the tail."""

    block_ids: list[int]
    tail: bytes | None


@dataclass
class _Hold:
    num_blocks: int
    changed: threading.Condition
    block_ids: list[int] = field(default_factory=list)
    tail: bytes | None = None
    claimed: bool = False


class Holds:
    """Thread-safe: the engine publishes and withdraws, the connector's threads claim, follow and confirm."""

    def __init__(self, epoch: str, layout: BlockLayout) -> None:
        self._epoch = epoch
        self._layout = layout
        self._standing: dict[str, _Hold] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def publish(self, ticket: KVTicket, progress: Progress) -> None:
        """Let a ticket be claimed once, or say how much further it is. Raises ValueError as `Connector.publish`."""
        ticket_id = ticket.ticket_id
        with self._lock:
            if ticket_id in self._ended:
                return
            num_blocks = self._layout.blocks_for(ticket.num_tokens)
            hold = self._standing.get(ticket_id) or _Hold(num_blocks, threading.Condition(self._lock))
            check_progress(ticket, hold, progress)
            hold.block_ids = list(progress.block_ids)
            hold.tail = progress.tail
            self._standing[ticket_id] = hold
            hold.changed.notify_all()

    def claim(self, want: Want) -> None:
        """Make a ticket this consumer's. Raises PullError; a refused claim leaves the ticket as it was."""
        if want.epoch != self._epoch:
            raise PullError("epoch", "the engine that issued this ticket has restarted")
        with self._lock:
            hold = self._find(want.ticket_id)
            self._check_shape(want, hold)
            if hold.claimed:
                raise PullError("used", f"ticket {want.ticket_id} was claimed before")
            hold.claimed = True

    def steps(self, want: Want, idle_s: float) -> Iterator[Step]:
        """The blocks of a claimed ticket as they become ready, until its tail, with an empty step after every `idle_s`
        seconds without news. Raises PullError when the ticket ends meanwhile."""
        num_seen, tail = want.skip_blocks, None
        while tail is None:
            block_ids, tail = self._wait(want.ticket_id, num_seen, idle_s)
            num_seen += len(block_ids)
            yield Step(block_ids, tail)

    def confirm(self, ticket_id: str) -> None:
        """End a claimed ticket whose blocks were copied. Raises PullError("withdrawn") if it ended meanwhile."""
        with self._lock:
            self._find(ticket_id)
            self._end(ticket_id, "used")

    def decline(self, ticket_id: str) -> bool:
        """End a ticket that its consumer wants no more; False when there is none."""
        with self._lock:
            stands = ticket_id in self._standing
            if stands:
                self._end(ticket_id, "used")
            return stands

    def stands(self, ticket_id: str) -> bool:
        """Whether a ticket was published and has not ended."""
        with self._lock:
            return ticket_id in self._standing

    @property
    def num_standing(self) -> int:
        return len(self._standing)

    def withdraw(self, ticket_id: str) -> None:
        """End a ticket at once; unknown ones are ignored."""
        with self._lock:
            if ticket_id in self._standing:
                self._end(ticket_id, "withdrawn")

    def close(self) -> None:
        """End all tickets: their producer is going."""
        with self._lock:
            for ticket_id in list(self._standing):
                self._end(ticket_id, "unreachable")

    def _wait(self, ticket_id: str, num_seen: int, timeout_s: float) -> Step:
        with self._lock:
            hold = self._find(ticket_id)
            hold.changed.wait_for(
                lambda: len(hold.block_ids) > num_seen or hold.tail is not None or ticket_id not in self._standing,
                timeout_s,
            )
            self._find(ticket_id)
            return Step(hold.block_ids[num_seen:], hold.tail)

    def _find(self, ticket_id: str) -> _Hold:
        if ticket_id in self._standing:
            return self._standing[ticket_id]
        cause = self._ended.get(ticket_id, "unknown_ticket")
        raise PullError(cause, f"ticket {ticket_id} is not held by the producer ({cause})")

    def _check_shape(self, want: Want, hold: _Hold) -> None:
        geometry = self._layout.geometry()
        if want.geometry != geometry:
            raise PullError("layout", describe_difference(geometry, want.geometry))
        if want.skip_blocks < 0 or hold.num_blocks - want.skip_blocks != want.num_blocks:
            raise PullError(
                "protocol", f"{want.num_blocks} blocks wanted after {want.skip_blocks} of {hold.num_blocks}"
            )

    def _end(self, ticket_id: str, cause: str) -> None:
        self._standing.pop(ticket_id).changed.notify_all()
        self._ended[ticket_id] = cause
        while len(self._ended) > NUM_ENDED_REMEMBERED:
            self._ended.popitem(last=False)


def check_progress(ticket: KVTicket, hold: _Hold, progress: Progress) -> None:
    """Raises ValueError when `progress` cannot follow on what `hold` has."""
    num_ready, name = len(progress.block_ids), f"progress of ticket {ticket.ticket_id}"
    if progress.block_ids[: len(hold.block_ids)] != hold.block_ids or hold.tail not in (None, progress.tail):
        raise ValueError(f"{name} takes back what was published before")
    if num_ready > hold.num_blocks:
        raise ValueError(f"{name} has {num_ready} blocks, but {ticket.num_tokens} tokens take {hold.num_blocks}")
    if progress.tail is not None and (num_ready < hold.num_blocks or len(progress.tail) > MAX_TAIL_BYTES):
        raise ValueError(f"{name} has a tail of {len(progress.tail)} bytes at {num_ready} of {hold.num_blocks} blocks")


def describe_difference(producer: tuple[int, ...], consumer: tuple[int, ...]) -> str:
    """Name the numbers that differ between two geometries of equal length."""
    pairs = zip(GEOMETRY, producer, consumer, strict=True)
    return "; ".join(f"{name}: producer {a}, consumer {b}" for name, a, b in pairs if a != b)
