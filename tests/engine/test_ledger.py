"""Tickets that an engine issues, and until when: nothing handed out is out of date, nothing computed is late."""

from __future__ import annotations

from dataclasses import dataclass, field

from fourhop.engine.ledger import HoldLedger, Identity
from fourhop.engine.sequence import Sequence
from fourhop.kv.connector import Event, Progress
from fourhop.wire.generate import SamplingParams
from fourhop.wire.ticket import FirstToken, KVTicket, verify

LEASE_S = 30.0
SECRET = "fleet"


@dataclass
class RecordingConnector:
    """Keeps what was published and releases nothing by itself."""

    name: str = "recording"
    published: list[Progress] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def publish(self, ticket: KVTicket, progress: Progress) -> KVTicket:
        self.published.append(progress)
        return ticket

    def pull(self, ticket: KVTicket, block_ids: list[int], names: list[bytes], skip_blocks: int = 0) -> None:
        raise AssertionError("a ledger pulls nothing")

    def release(self, ticket_id: str) -> None:
        self.released.append(ticket_id)

    def renew(self, ticket: KVTicket) -> None:
        raise AssertionError("a ledger is the producer's")

    def poll(self) -> list[Event]:
        return []

    def close(self) -> None:
        return None


@dataclass
class Books:
    """A ledger and its two clocks, which go at one speed: `now_s` begins at 0, the wall clock at 1,000."""

    now_s: float = 0.0
    connector: RecordingConnector = field(default_factory=RecordingConnector)

    def __post_init__(self) -> None:
        self.ledger = HoldLedger(
            self.connector,
            Identity("e", "epoch", "f"),
            block_size=4,
            lease_s=LEASE_S,
            secret=SECRET,
            wall_clock=lambda: 1000.0 + self.now_s,
        )

    def check(self, ticket: KVTicket) -> None:
        """As a consumer does that is handed the ticket now."""
        verify(ticket, fingerprint="f", token_ids=list(range(6)), now_s=1000.0 + self.now_s, secret=SECRET)


def computed(num_computed: int = 6) -> Sequence:
    return Sequence(
        1, "r", list(range(6)), SamplingParams(), 0, 1, frozenset(), blocks=[7, 8], num_computed=num_computed
    )


def test_a_renewed_ticket_is_good_for_another_lease() -> None:
    books = Books()
    ticket = books.ledger.issue(computed(), FirstToken(9), books.now_s)
    for _ in range(5):
        books.now_s += 0.9 * LEASE_S
        [ticket] = books.ledger.renew([ticket.ticket_id, "unknown"], books.now_s)
        books.check(ticket)
    books.now_s += 0.9 * LEASE_S
    assert books.ledger.expire(books.now_s) == []
    books.check(ticket)
    books.now_s += 0.1 * LEASE_S
    assert books.ledger.expire(books.now_s) == [ticket.ticket_id]
    assert books.connector.released == [ticket.ticket_id]
    assert books.ledger.renew([ticket.ticket_id], books.now_s) == []


def test_a_prompt_that_takes_longer_than_a_lease_has_a_good_ticket_at_its_end() -> None:
    books = Books()
    sequence = computed(num_computed=0)
    early = books.ledger.open(sequence)
    books.check(early)
    for num_computed in (2, 4):
        books.now_s += LEASE_S
        sequence.num_computed = num_computed
        books.ledger.extend(sequence)
        assert books.ledger.expire(books.now_s) == []
    [renewed] = books.ledger.renew([early.ticket_id], books.now_s)
    books.check(renewed)
    assert books.ledger.next_expiry_in_s(books.now_s) is None

    books.now_s += 2 * LEASE_S
    sequence.num_computed = 6
    whole = books.ledger.issue(sequence, FirstToken(9), books.now_s)
    assert whole.ticket_id == early.ticket_id
    books.check(whole)
    assert books.ledger.next_expiry_in_s(books.now_s) == LEASE_S
    assert [len(progress.block_ids) for progress in books.connector.published] == [0, 1, 2]
