"""The engine's side of hand-overs: tickets it issued, with their leases, and the connector that moves the blocks."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from fourhop.engine.sampler import Sampled
from fourhop.engine.sequence import Sequence
from fourhop.kv.connector import Connector, Progress, Pulled, PullFailed, Released, Renewed
from fourhop.wire.ticket import FirstToken, KVTicket, hash_tokens


@dataclass(frozen=True)
class Identity:
    """Who this engine is: `epoch` is new at every start, `fingerprint` says whose KV it can use."""

    engine_id: str
    epoch: str
    fingerprint: str


class HoldLedger:
    """Issues a ticket for every hold and ends each once: pulled, withdrawn, or expired after `lease_s` seconds."""

    def __init__(
        self, connector: Connector, identity: Identity, *, lease_s: float, wall_clock: Callable[[], float]
    ) -> None:
        self.identity = identity
        self.num_expired = 0
        self._connector = connector
        self._lease_s = lease_s
        self._wall_clock = wall_clock
        self._deadlines_s: dict[str, float] = {}

    @property
    def connector_name(self) -> str:
        return self._connector.name

    def issue(self, sequence: Sequence, token: Sampled, now_s: float) -> KVTicket:
        """A ticket for the blocks of a held sequence; KV covers every token but the one just sampled."""
        ticket = KVTicket(
            ticket_id=secrets.token_hex(16),
            connector=self._connector.name,
            epoch=self.identity.epoch,
            fingerprint=self.identity.fingerprint,
            token_hash=hash_tokens(sequence.token_ids[: sequence.num_computed]),
            expires_at_s=self._wall_clock() + self._lease_s,
            engine_id=self.identity.engine_id,
            request_id=sequence.request_id,
            host="",
            port=0,
            num_tokens=sequence.num_computed,
            block_ids=[list(sequence.blocks)],
            cached_tokens=sequence.num_cached or 0,
            first_token=FirstToken(token.token_id, token.logprob),
        )
        self._deadlines_s[ticket.ticket_id] = now_s + self._lease_s
        return self._connector.publish(ticket, Progress(list(sequence.blocks), names=[], tail=b""))

    def pull(self, ticket: KVTicket, block_ids: list[int], skip_blocks: int) -> None:
        self._connector.pull(ticket, block_ids, [], skip_blocks)

    def decline(self, ticket: KVTicket) -> None:
        """Claim a ticket without pulling anything, so that its producer frees the blocks."""
        self._connector.pull(ticket, [], [], sum(len(group) for group in ticket.block_ids))

    def withdraw(self, ticket_id: str) -> None:
        """Make a ticket worthless. Its blocks may be reused when this returns."""
        self._deadlines_s.pop(ticket_id, None)
        self._connector.release(ticket_id)

    def poll(self, now_s: float) -> list[Pulled | PullFailed | Released]:
        """What ended: the connector's news, and a `Released` for every ticket whose lease ran out."""
        events: list[Pulled | PullFailed | Released] = []
        for event in self._connector.poll():
            if isinstance(event, Renewed):
                self._renew(event.ticket_id, now_s)
                continue
            if isinstance(event, Released):
                self._deadlines_s.pop(event.ticket_id, None)
            events.append(event)
        for ticket_id in [name for name, deadline in self._deadlines_s.items() if deadline <= now_s]:
            self.num_expired += 1
            self.withdraw(ticket_id)
            events.append(Released(ticket_id))
        return events

    def _renew(self, ticket_id: str, now_s: float) -> None:
        if ticket_id in self._deadlines_s:
            self._deadlines_s[ticket_id] = now_s + self._lease_s

    def next_expiry_in_s(self, now_s: float) -> float | None:
        if not self._deadlines_s:
            return None
        return max(0.0, min(self._deadlines_s.values()) - now_s)

    def close(self) -> None:
        self._connector.close()
