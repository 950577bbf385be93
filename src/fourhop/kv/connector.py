"""The connector contract: six methods by which KV blocks leave one engine and reach another.

Life of a hand-over, by side:

    producer                                        consumer
    publish(ticket, nothing ready)                  renew(ticket)        while it waits for blocks of its own
    publish(ticket, more blocks)                    pull(ticket, block_ids)   copying goes on as blocks become ready
    publish(ticket, all blocks and the tail)        poll() -> Pulled     every byte is in place, confirmed; the tail
    poll() -> Released  the consumer has them                or PullFailed   nothing may be assumed of the blocks
    release(ticket_id)  (instead: abort or expiry)  release(ticket_id)   (instead: the request ended)

A ticket may be published whole, in one call. The engine owns the blocks on both sides. The producer must not reuse
blocks between `publish` and either the `Released` event or the return of `release`; the consumer must not reuse
`block_ids` before `Pulled` or `PullFailed`.

A connector that keeps blocks by content may have one method more, `find(fingerprint, names)`: how many leading blocks
of a model it has. It reads from disk or network, so it is not for the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fourhop.wire.ticket import KVTicket


@dataclass(frozen=True)
class Progress:
    """How much of a ticket's KV exists on the producer.

    `block_ids` are the blocks whose content is final, in order, from the first on; each call has at least those of the
    call before. `names` has a content hash for each of them. `tail`, small and opaque, comes with the last block and
    reaches the consumer with `Pulled`; None until then.
    """

    block_ids: list[int]
    names: list[bytes]
    tail: bytes | None = None


@dataclass(frozen=True)
class Pulled:
    """Consumer: the blocks of this ticket are in place; the producer confirmed they were valid to the end."""

    ticket_id: str
    num_bytes: int
    tail: bytes = b""


@dataclass(frozen=True)
class PullFailed:
    """Consumer: the pull ended without usable blocks. `cause` is one of `CAUSES`."""

    ticket_id: str
    cause: str
    message: str


@dataclass(frozen=True)
class Released:
    """Producer: the consumer has pulled this ticket, or gave it up, or is gone; its blocks are the engine's again.

    A store, which has copies, says so as soon as it has them all; the ticket can be pulled after that.
    """

    ticket_id: str


@dataclass(frozen=True)
class Renewed:
    """Producer: a consumer pulls this ticket, or is not ready to and asked to keep it. Comes often."""

    ticket_id: str


Event = Pulled | PullFailed | Released | Renewed

MAX_TAIL_BYTES = 64 * 2**10

CAUSES = (
    "unreachable",
    "timeout",
    "epoch",
    "unknown_ticket",
    "used",
    "withdrawn",
    "cancelled",
    "forbidden",
    "layout",
    "corrupt",
    "protocol",
    "internal",
)
"""Why a pull failed: no connection; no word in time; the producer restarted; it knows no such ticket; the ticket was
claimed before; the producer released it before or during the pull; the consumer gave the pull up; the configuration
does not name the ticket's address; the two pools differ in geometry; the bytes that came are
not those that were sent; the peer spoke nonsense; a bug of ours (the log
has its traceback)."""


class PullError(Exception):
    """A pull that cannot go on, inside a connector; it reaches the engine as `PullFailed`."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause
        self.message = message


class Connector(Protocol):
    """Moves blocks. Methods are called from the engine's loop thread, return at once and never block on a peer.

    `notify` (given at construction) is called from any thread when `poll` has something new.
    """

    name: str

    def publish(self, ticket: KVTicket, progress: Progress) -> KVTicket:
        """Producer: let `ticket` be pulled once, as far as `progress` says; returns it with its address.

        Later calls with the same id say how much further it is; for a ticket that ended meanwhile they do nothing.
        `ticket.num_tokens` is final from the first call on and says how many blocks there will be. Raises ValueError
        for progress that takes back what was published, has too many blocks, or a tail that is early or too long.
        """

    def pull(self, ticket: KVTicket, block_ids: list[int], names: list[bytes], skip_blocks: int = 0) -> None:
        """Consumer: begin to copy the ticket's blocks into `block_ids`, each when it is ready on the producer.

        The first `skip_blocks` of the ticket's blocks are left out, so `len(block_ids)` is the rest. An empty list is
        valid: nothing is copied, the ticket is still claimed and released, when the producer has its tail. `names` are
        the consumer's own content hashes of the blocks wanted, or empty where it has none; connectors that read by
        content need them. The end arrives through `poll`, soon after the ticket is complete, or when the producer was
        not heard of for the connector's timeout. Raises nothing: every failure is a `PullFailed`.
        """

    def release(self, ticket_id: str) -> None:
        """Withdraw one's own ticket, or give up one's pull of it. Unknown ids are ignored.

        Producer: after this no pull of the ticket can succeed. A pull that was confirmed just before still ends in its
        `Released`, so that event may follow a release. Consumer: the pull ends soon in `PullFailed("cancelled")`,
        unless it has just succeeded, and the producer is told, which gets `Released`.
        """

    def renew(self, ticket: KVTicket) -> None:
        """Consumer: ask the producer to keep a ticket that cannot be pulled yet. Best effort, nothing comes back.

        A ticket that is being pulled needs none: the producer gets `Renewed` for as long as that goes on.
        """

    def poll(self) -> list[Event]:
        """What happened since the last call, each event once."""

    def close(self) -> None:
        """Stop threads, close sockets and mappings. Pending pulls fail. Idempotent."""


Notify = Callable[[], None]
