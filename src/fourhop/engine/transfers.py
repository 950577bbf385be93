"""Hand-overs of one engine, both sides: what the loop does about tickets, given and taken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import msgspec

from fourhop.engine.jobs import Job, Jobs, Update
from fourhop.engine.ledger import HoldLedger
from fourhop.engine.pulls import PullBook
from fourhop.engine.sampled import Sampled
from fourhop.engine.scheduler import Scheduler
from fourhop.engine.sequence import Finish, Phase, Sequence, finish_of
from fourhop.engine.step import Load, Work
from fourhop.kv.connector import Connector, Pulled, PullFailed, Released, Renewed
from fourhop.service.fallbacks import Seldom
from fourhop.wire.errors import TransferError
from fourhop.wire.moments import Moment
from fourhop.wire.ticket import FirstToken, KVTicket

log = logging.getLogger(__name__)

RENEW_EVERY_S = 2.0
"""How often producers are asked to keep what waits for blocks here; several times in the shortest sensible lease."""

MIGRATED = Finish("migrated")

Stage = Callable[[list[int]], None]


class Transfers:
    """Called by the loop, on its thread. `stage_out` and `stage_in` move blocks between device and pool."""

    def __init__(
        self,
        connector: Connector,
        ledger: HoldLedger,
        pulls: PullBook,
        scheduler: Scheduler,
        jobs: Jobs,
        *,
        stage_out: Stage,
        stage_in: Stage,
        recompute: bool,
    ) -> None:
        self.connector = connector
        self.ledger = ledger
        self.pulls = pulls
        self._scheduler = scheduler
        self._jobs = jobs
        self._stage_out = stage_out
        self._stage_in = stage_in
        self._recompute = recompute
        self._seldom = Seldom(log, jobs.clock)

    # Given.

    def open(self, sequence: Sequence) -> KVTicket:
        """A ticket for what a sequence will have computed."""
        return self.ledger.open(sequence)

    def extend(self, work: list[Work]) -> None:
        """Let blocks travel that a step completed, of sequences whose tickets are out already."""
        for sequence in [item.sequence for item in work if item.sequence.held_as]:
            if sequence.phase is Phase.RUNNING:
                self._stage_out(sequence.blocks)
                self.ledger.extend(sequence)

    def issue(self, sequence: Sequence, token: Sampled | None = None) -> KVTicket | None:
        """The ticket of a sequence that is held; None for an orphan, whose blocks are freed instead."""
        if sequence.is_orphan:
            self._scheduler.abort(sequence)
            return None
        self._stage_out(sequence.blocks)
        first = None if token is None else FirstToken(token.token_id, token.logprob)
        return self.ledger.issue(sequence, first, self._jobs.clock())

    def hold_prefix(self, sequence: Sequence) -> KVTicket | None:
        """Hold the blocks that are cached of a sequence's beginning, with a ticket for them."""
        return self.issue(sequence) if self._scheduler.hold_prefix(sequence) else None

    def migrate(self, sequence: Sequence) -> KVTicket | None:
        """Stop a sequence; what it has computed is held under a ticket, if that is anything."""
        if sequence.phase is Phase.RUNNING and sequence.num_computed > 0 and not sequence.held_as:
            self._scheduler.suspend(sequence)
            return self.issue(sequence)
        self._scheduler.abort(sequence)
        return None

    # Taken.

    def begin(self, loads: list[Load]) -> None:
        """Start the pulls that a step asks for."""
        for load in loads:
            job = self._jobs.of(load.sequence)
            if job is not None:
                self._jobs.mark(job, Moment.KV_REQUESTED)
            refusal = self.pulls.begin(load)
            if refusal is not None:
                self._end_load(load.sequence, refusal)

    def decline(self, ticket: KVTicket) -> None:
        """Nobody will pull a ticket: let its producer free the blocks."""
        self.pulls.decline(ticket)

    def count_failure(self, cause: str, *, recomputed: bool) -> None:
        counters = self._jobs.counters
        counters.count(counters.transfer_failures, cause)
        counters.recomputed += recomputed

    # Both.

    def poll(self) -> None:
        """Act on what the connector did and on leases that ended."""
        now = self._jobs.clock()
        for event in self.connector.poll():
            if isinstance(event, Renewed):
                self.ledger.renew([event.ticket_id], now)
            elif isinstance(event, Released):
                self.ledger.forget(event.ticket_id)
                self._let_go(event.ticket_id)
            elif (sequence := self.pulls.end(event)) is not None:
                self._end_load(sequence, event)
        for ticket_id in self.ledger.expire(now):
            self._let_go(ticket_id)
        self.pulls.renew(self._scheduler.waiting, now)

    def abandon(self, sequence: Sequence) -> None:
        """A sequence ended: nobody may pull its blocks any more, and what it was to pull is given up."""
        self.ledger.withdraw(sequence.held_as)
        self.pulls.give_up(sequence)

    def idle_timeout_s(self) -> float | None:
        """Until something is due here; None if nothing will be without an event."""
        expiry = self.ledger.next_expiry_in_s(self._jobs.clock())
        return RENEW_EVERY_S if self._scheduler.waiting else expiry

    def _let_go(self, ticket_id: str) -> None:
        """A ticket ended: free the blocks of its sequence, or do so when that has been computed."""
        for sequence in [each for each in self._scheduler.held.values() if each.held_as == ticket_id]:
            self._scheduler.abort(sequence)
        for job in self._jobs:
            if job.sequence.held_as == ticket_id:
                job.sequence.is_orphan = True

    def _end_load(self, sequence: Sequence, event: Pulled | PullFailed) -> None:
        job = self._jobs.of(sequence)
        if isinstance(event, Pulled):
            self._jobs.counters.transfers += 1
            self._jobs.counters.transfer_bytes += event.num_bytes
            self._stage_in(sequence.blocks)
            self._scheduler.loaded(sequence)
            if job is not None:
                self._take_first_token(job, event.tail)
            return
        is_fatal = not self._recompute and not sequence.has_hint
        self.count_failure(event.cause, recomputed=not is_fatal)
        self._scheduler.load_failed(sequence, recompute=not is_fatal)
        if job is not None and is_fatal:
            self._jobs.end(job, Update(error=TransferError(event.cause, event.message)))
        elif job is not None:
            what = f"request {sequence.request_id}: {event.message}; computing it here"
            self._seldom.tell(f"kv_{event.cause}", what)
            self._jobs.deliver_first_token(job)

    def _take_first_token(self, job: Job, tail: bytes) -> None:
        """The KV is here, and in the tail the first token, unless the request brought that itself."""
        self._jobs.mark(job, Moment.KV_READY)
        sequence = job.sequence
        if tail and not sequence.hold and not sequence.output_token_ids:
            first = msgspec.msgpack.decode(tail, type=FirstToken)
            sequence.append(first.token_id)
            job.first_token = Update(first.token_id, first.logprob)
            finish = finish_of(sequence, self._scheduler.limits.max_model_len)
            if finish is not None:
                self._scheduler.abort(sequence)
                self._jobs.end(job, replace(job.first_token, finish=finish))
                return
        self._jobs.deliver_first_token(job)
