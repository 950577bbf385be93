"""The consumer's side of hand-overs: tickets of other engines that this one pulls, or waits to pull."""

from __future__ import annotations

from collections.abc import Iterable

from fourhop.engine.sequence import Sequence, block_names
from fourhop.engine.step import Load
from fourhop.kv.connector import Connector, Pulled, PullFailed
from fourhop.wire.ticket import KVTicket


class PullBook:
    """Which sequence each pull is for. A ticket is pulled for one sequence at a time."""

    def __init__(self, connector: Connector, *, block_size: int, renew_every_s: float) -> None:
        self._connector = connector
        self._block_size = block_size
        self._renew_every_s = renew_every_s
        self._renewed_at_s = float("-inf")
        self._sequences: dict[str, Sequence | None] = {}  # None for a ticket that was declined

    def __len__(self) -> int:
        """Pulls whose end has not come yet."""
        return len(self._sequences)

    def begin(self, load: Load) -> PullFailed | None:
        """Start a pull; the failure if the ticket is being pulled for another sequence."""
        ticket = load.sequence.ticket
        assert ticket is not None
        if ticket.ticket_id in self._sequences:
            return PullFailed(ticket.ticket_id, "used", "another request is pulling this ticket")
        self._sequences[ticket.ticket_id] = load.sequence
        names = block_names(load.sequence, ticket.num_tokens, self._block_size)
        self._connector.pull(ticket, load.block_ids, names[load.skip_blocks :], load.skip_blocks)
        return None

    def decline(self, ticket: KVTicket) -> None:
        """Claim a ticket without pulling anything, so that its producer frees the blocks."""
        if ticket.ticket_id not in self._sequences:
            self._sequences[ticket.ticket_id] = None
            self._connector.pull(ticket, [], [], -(-ticket.num_tokens // self._block_size))
            self._connector.release(ticket.ticket_id)  # it may not be complete, and nobody waits for that

    def give_up(self, sequence: Sequence) -> None:
        """A sequence ended: its pull is cut short, and still ends in its event, or its ticket is declined."""
        ticket = sequence.ticket
        if ticket is None:
            return
        if self._sequences.get(ticket.ticket_id) is sequence:
            self._connector.release(ticket.ticket_id)
        else:
            self.decline(ticket)

    def end(self, event: Pulled | PullFailed) -> Sequence | None:
        """Whose pull this was the end of; None if nobody waits for it."""
        return self._sequences.pop(event.ticket_id, None)

    def renew(self, waiting: Iterable[Sequence], now_s: float) -> None:
        """From time to time, ask producers to keep what sequences wait for that have no blocks yet."""
        if now_s - self._renewed_at_s < self._renew_every_s:
            return
        self._renewed_at_s = now_s
        for sequence in waiting:
            if sequence.ticket is not None:
                self._connector.renew(sequence.ticket)
