"""`multi`: a chain of connectors. Tickets are published to all of them and pulled from the first that has the blocks.

A ticket's `address` says where its blocks are, as JSON: a list of [connector, host, port, address], one for each of the
producer's chain. A consumer follows its own chain, whose members it finds there by name.

A pull that fails goes on with the next member, unless it was given up, or the ticket is another's. What is not needed
of the chain is declined, so the producer has its blocks back when every member is done with them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from fourhop.kv.connector import (
    Connector,
    Event,
    Notify,
    Progress,
    Pulled,
    PullError,
    PullFailed,
    Released,
    Renewed,
)
from fourhop.kv.pulls import Outbox
from fourhop.wire.errors import StartError
from fourhop.wire.ticket import KVTicket

FINAL = ("used", "cancelled")
"""Causes that no other member of the chain can mend."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where one connector has a ticket's blocks: what it put into the ticket."""

    connector: str
    host: str
    port: int
    address: str


@dataclass
class Attempt:
    """A pull on its way along the chain: the members (by number) that are left, each with a ticket of its own."""

    ticket_id: str
    routes: deque[tuple[int, KVTicket]]
    block_ids: list[int]
    names: list[bytes]
    skip_blocks: int
    failures: list[PullFailed] = field(default_factory=list)


class MultiConnector:
    """A `Connector` of connectors. Their events are taken on whatever thread announces them.

    Members share the pool and the epoch. A ticket is pulled by one caller at a time.
    """

    name = "multi"

    def __init__(self, openers: Sequence[Callable[[Notify], Connector]], notify: Notify) -> None:
        self._outbox = Outbox(notify)
        self._lock = threading.RLock()
        self._standing: dict[str, set[int]] = {}  # which members still need a ticket's blocks
        self._under_way: dict[tuple[int, str], deque[Attempt | None]] = {}  # None for what was declined
        self._members: list[Connector] = []
        self._closed = False
        try:
            for number, opener in enumerate(openers):
                self._members.append(opener(partial(self._take, number)))
        except StartError:
            self.close()
            raise

    def publish(self, ticket: KVTicket, progress: Progress) -> KVTicket:
        bare = msgspec.structs.replace(ticket, address="")
        with self._lock:
            published = [member.publish(bare, progress) for member in self._members]
            if not ticket.address:  # the first time
                self._standing[ticket.ticket_id] = set(range(len(self._members)))
        places = [Place(each.connector, each.host, each.port, each.address) for each in published]
        address = msgspec.json.encode(places).decode()
        first = places[0]
        return msgspec.structs.replace(ticket, connector=self.name, host=first.host, port=first.port, address=address)

    def pull(self, ticket: KVTicket, block_ids: list[int], names: list[bytes], skip_blocks: int = 0) -> None:
        try:
            routes = self._routes(ticket)
        except PullError as error:
            self._outbox.put(PullFailed(ticket.ticket_id, error.cause, error.message))
            return
        with self._lock:
            self._try(Attempt(ticket.ticket_id, deque(routes), list(block_ids), list(names), skip_blocks))

    def release(self, ticket_id: str) -> None:
        with self._lock:
            self._standing.pop(ticket_id, None)
            for member in self._members:
                member.release(ticket_id)

    def renew(self, ticket: KVTicket) -> None:
        try:
            routes = self._routes(ticket)
        except PullError:
            return
        for number, route in routes:
            self._members[number].renew(route)

    def poll(self) -> list[Event]:
        return self._outbox.take()

    def close(self) -> None:
        self._closed = True
        for member in self._members:
            member.close()

    def _routes(self, ticket: KVTicket) -> list[tuple[int, KVTicket]]:
        """The members that may have a ticket's blocks, each with the ticket as it would be for that one alone."""
        if ticket.connector != self.name:
            raise PullError("protocol", f"a ticket for the {ticket.connector} connector came to {self.name}")
        try:
            places = {place.connector: place for place in msgspec.json.decode(ticket.address, type=list[Place])}
        except msgspec.DecodeError as error:
            raise PullError("protocol", f"the ticket's address is not one of {self.name}: {error}") from None
        routes = [
            (number, msgspec.structs.replace(ticket, **msgspec.structs.asdict(places[member.name])))
            for number, member in enumerate(self._members)
            if member.name in places
        ]
        if not routes:
            raise PullError("unreachable", f"none of {', '.join(places) or 'nothing'} is a connector of this engine's")
        return routes

    def _try(self, attempt: Attempt) -> None:
        """Pull from the first member that is left."""
        number, route = attempt.routes.popleft()
        self._expect(number, attempt.ticket_id, attempt)
        self._members[number].pull(route, attempt.block_ids, attempt.names, attempt.skip_blocks)

    def _decline(self, attempt: Attempt) -> None:
        """Tell the members that are left that nobody will come for the ticket."""
        num_blocks = attempt.skip_blocks + len(attempt.block_ids)
        for number, route in attempt.routes:
            self._expect(number, attempt.ticket_id, None)
            self._members[number].pull(route, [], [], num_blocks)
            self._members[number].release(attempt.ticket_id)
            self._let_go(number, attempt.ticket_id)  # if the ticket was this engine's own

    def _expect(self, number: int, ticket_id: str, attempt: Attempt | None) -> None:
        self._under_way.setdefault((number, ticket_id), deque()).append(attempt)

    def _take(self, number: int) -> None:
        """What a member calls when it has events."""
        with self._lock:
            for event in self._members[number].poll():
                match event:
                    case Renewed():
                        self._outbox.put(event)
                    case Released(ticket_id):
                        self._let_go(number, ticket_id)
                    case _:
                        self._end(number, event)

    def _let_go(self, number: int, ticket_id: str) -> None:
        """A member needs a ticket's blocks no more; the last one lets the engine know."""
        members = self._standing.get(ticket_id)
        if members is not None:
            members.discard(number)
            if not members:
                del self._standing[ticket_id]
                self._outbox.put(Released(ticket_id))

    def _end(self, number: int, event: Pulled | PullFailed) -> None:
        attempts = self._under_way[number, event.ticket_id]
        attempt = attempts.popleft()
        if not attempts:
            del self._under_way[number, event.ticket_id]
        if attempt is None:
            return
        if isinstance(event, Pulled):
            self._outbox.put(event)
            self._decline(attempt)
            return
        message = f"{self._members[number].name}: {event.message}"
        attempt.failures.append(PullFailed(event.ticket_id, event.cause, message))
        if event.cause not in FINAL and attempt.routes and not self._closed:
            self._try(attempt)
            return
        self._outbox.put(verdict(attempt.failures))
        if event.cause == "cancelled":
            self._decline(attempt)


def verdict(failures: list[PullFailed]) -> PullFailed:
    """One event for a pull that failed everywhere. That a member is unreachable says nothing about the ticket, so the
    cause is the last member's if that one ended it, or the first that is another."""
    last = failures[-1]
    telling = [failure for failure in failures if failure.cause != "unreachable"]
    cause = last.cause if last.cause in FINAL or not telling else telling[0].cause
    return PullFailed(last.ticket_id, cause, "; ".join(failure.message for failure in failures))
