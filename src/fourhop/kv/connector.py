"""The connector contract: five methods by which KV blocks leave one engine and reach another.

Life of a hand-over, by side:

    producer                                   consumer
    publish(ticket)     blocks may be pulled
                                               pull(ticket, block_ids)   copying starts, on the connector's thread
                                               poll() -> Pulled          every byte is in place and confirmed valid
    poll() -> Released  the consumer has them        or PullFailed       nothing may be assumed of the blocks
    release(ticket_id)  (instead: abort or expiry)

The engine owns the blocks on both sides. The producer must not reuse blocks between `publish` and either the
`Released` event or the return of `release`; the consumer must not reuse `block_ids` before `Pulled` or `PullFailed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fourhop.wire.ticket import KVTicket


@dataclass(frozen=True)
class Pulled:
    """Consumer: the blocks of this ticket are in place; the producer confirmed they were valid to the end."""

    ticket_id: str
    num_bytes: int


@dataclass(frozen=True)
class PullFailed:
    """Consumer: the pull ended without usable blocks. `cause` is one of `CAUSES`."""

    ticket_id: str
    cause: str
    message: str


@dataclass(frozen=True)
class Released:
    """Producer: the consumer has pulled (or refused) this ticket; its blocks are the engine's again."""

    ticket_id: str


Event = Pulled | PullFailed | Released

CAUSES = ("unreachable", "timeout", "epoch", "unknown_ticket", "used", "withdrawn", "layout", "protocol", "internal")
"""Why a pull failed: no connection; no answer in time; the producer restarted; it knows no such ticket; the ticket was
claimed before; the producer released it before or during the pull; the two pools differ in geometry; the peer spoke
nonsense; a bug of ours (the log has its traceback)."""


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

    def publish(self, ticket: KVTicket) -> KVTicket:
        """Producer: let `ticket` be pulled once; returns it with the address that a consumer needs."""

    def pull(self, ticket: KVTicket, block_ids: list[int], skip_blocks: int = 0) -> None:
        """Consumer: begin to copy the ticket's blocks into `block_ids`.

        The first `skip_blocks` of the ticket's blocks are left out, so `len(block_ids)` is the rest. An empty list is
        valid: nothing is copied, the ticket is still claimed and released. The end arrives through `poll`, within
        the connector's timeout. Raises nothing: every failure is a `PullFailed`.
        """

    def release(self, ticket_id: str) -> None:
        """Producer: withdraw a ticket. After this no pull of it can succeed; unknown ids are ignored.

        A pull that was confirmed just before still ends in its `Released`, so that event may follow a release.
        """

    def poll(self) -> list[Event]:
        """What ended since the last call, each event once."""

    def close(self) -> None:
        """Stop threads, close sockets and mappings. Pending pulls fail. Idempotent."""


Notify = Callable[[], None]
