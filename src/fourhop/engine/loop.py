"""The engine's loop: one thread that owns the sequences, the blocks and the model.

`step` is the whole engine: take requests, poll transfers, schedule, run, publish. Other threads speak to it through
`submit` and `abort`; it answers through each job's `deliver`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from fourhop.engine.durations import Durations
from fourhop.engine.ledger import HoldLedger
from fourhop.engine.pulls import PullBook
from fourhop.engine.sampler import Sampled
from fourhop.engine.scheduler import Load, Scheduler, Work
from fourhop.engine.sequence import Finish, Phase, Sequence, finish_of
from fourhop.kv.connector import Connector, Pulled, PullFailed, Released, Renewed
from fourhop.wire.errors import EngineError, FourhopError, TransferError
from fourhop.wire.logprobs import TokenLogprob
from fourhop.wire.moments import Moment, Timeline
from fourhop.wire.ticket import FirstToken, KVTicket
from fourhop.wire.worker import Lease

log = logging.getLogger(__name__)

RENEW_EVERY_S = 2.0
"""How often producers are asked to keep what waits for blocks here; several times in the shortest sensible lease."""


class ModelRunner(Protocol):
    """A model over the KV pool: `runner.Runner`, or the toy."""

    def run(self, work: list[Work]) -> dict[int, Sampled | None]:
        """Compute a step; the sampled token, or None where none can be chosen, by sequence id."""

    def stage_out(self, blocks: list[int]) -> None:
        """Make the pool's memory hold these blocks, for a connector to read."""

    def stage_in(self, blocks: list[int]) -> None:
        """Use what a connector wrote into these blocks of the pool's memory."""


@dataclass(frozen=True)
class Update:
    """What a job gained: a token, its end, or an error instead of everything else.

    The first with a token and the last carry the moments so far.
    """

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    finish: Finish | None = None
    ticket: KVTicket | None = None
    error: FourhopError | None = None
    moments: dict[str, float] | None = None


@dataclass(eq=False)
class Job:
    """A sequence and where its updates go. `deliver` is called on the loop's thread and must not block.

    `first_token` is one that prefill sampled elsewhere and nobody has sent yet: it goes out when its KV is here. With
    `early_ticket` a sequence that holds gets its ticket before it is computed.
    """

    sequence: Sequence
    deliver: Callable[[Update], object]
    timeline: Timeline
    first_token: Update | None = None
    early_ticket: bool = False
    is_announced: bool = False
    last_token_s: float | None = None


@dataclass(frozen=True)
class Transfers:
    """How this engine hands over: the connector, and what it knows of each side's tickets."""

    connector: Connector
    ledger: HoldLedger
    pulls: PullBook


@dataclass
class Counters:
    """What happened since the start. Written by the loop only."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_failures: dict[str, int] = field(default_factory=dict)
    recomputed: int = 0

    def count(self, table: dict[str, int], key: str) -> None:
        table[key] = table.get(key, 0) + 1


class EngineLoop:
    """Runs steps on a thread of its own until `stop`, or until a step raises: then every open job fails by name and
    `failure` says why and `on_failure` is called; an engine is whole or it is down."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        clock: Callable[[], float],
        recompute: bool,
    ) -> None:
        self.scheduler = scheduler
        self.transfers: Transfers | None = None
        self.counters = Counters()
        self.durations = Durations()
        self.failure: str | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.last_progress_s = clock()
        self.occupancy = scheduler.occupancy()
        self._runner = runner
        self.clock = clock
        self._recompute = recompute
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._jobs: dict[int, Job] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    # Called from other threads.

    def start(self, transfers: Transfers | None) -> None:
        """Begin. Without transfers this engine neither holds nor pulls."""
        self.transfers = transfers
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the step at hand; open jobs fail. Blocks until it has ended."""
        self._stopping = True
        self.notify()
        self._thread.join()

    def submit(self, job: Job) -> None:
        self._inbox.append(lambda: self._accept(job))
        self.notify()

    def abort(self, seq_ids: Iterable[int]) -> None:
        """End sequences whose client is gone, wherever they are. Unknown ids are ignored."""
        ids = list(seq_ids)
        self._inbox.append(lambda: self._abort(ids))
        self.notify()

    def abort_named(self, names: Iterable[str]) -> None:
        """End sequences by request id or ticket id, held ones included."""
        wanted = set(names) - {""}
        self._inbox.append(lambda: self._abort(self._ids_of(wanted)))
        self.notify()

    def ask(self, question: Callable[[], None]) -> None:
        """Have something done on the loop's thread, between two steps."""
        self._inbox.append(question)
        self.notify()

    def count_refusal(self, cause: str, *, recomputed: bool) -> None:
        """A ticket did not verify, so it never became a job's."""
        self._inbox.append(lambda: self._count_failure(cause, recomputed))
        self.notify()

    def notify(self) -> None:
        """There is news for the loop: wake it if it sleeps."""
        self._wake.set()

    @property
    def is_busy(self) -> bool:
        now = self.occupancy
        return bool(self._inbox) or now.num_running + now.num_waiting > 0

    # The loop's own thread, `ask` included.

    def migrate(self, names: list[str]) -> int:
        """End running sequences of these request ids with tickets for what they have computed."""
        wanted = set(names) - {""}
        jobs = [job for job in self._jobs.values() if job.sequence.request_id in wanted]
        for job in jobs:
            self._migrate(job)
        return len(jobs)

    def leases(self) -> list[Lease]:
        return [] if self.transfers is None else self.transfers.ledger.leases(self.clock())

    def renew(self, ticket_ids: list[str]) -> list[str]:
        return [] if self.transfers is None else self.transfers.ledger.renew(ticket_ids, self.clock())

    def hold_prefix(self, sequence: Sequence) -> KVTicket | None:
        """Hold the blocks that are cached of a sequence's beginning, with a ticket for them."""
        if self.transfers is None or not self.scheduler.hold_prefix(sequence):
            return None
        self._runner.stage_out(sequence.blocks)
        return self.transfers.ledger.issue(sequence, None, self.clock())

    def _migrate(self, job: Job) -> None:
        """What was computed is held under a ticket; what was not is the next engine's to compute."""
        sequence, ticket = job.sequence, None
        movable = sequence.phase is Phase.RUNNING and sequence.num_computed > 0 and not sequence.held_as
        if self.transfers is not None and movable:
            self.scheduler.suspend(sequence)
            self._runner.stage_out(sequence.blocks)
            ticket = self.transfers.ledger.issue(sequence, None, self.clock())
        else:
            self.scheduler.abort(sequence)
        self._end(job, Update(finish=Finish("migrated"), ticket=ticket))

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                if not self.step():
                    self._wake.wait(self.idle_timeout_s())
            self._fail_all(EngineError("the engine is shutting down"))
        except Exception as error:  # a worker loop fails one request or the process, never half
            log.exception("the engine loop failed")
            self.failure = f"the engine loop failed: {type(error).__name__}"
            self._fail_all(EngineError("the engine failed while it computed this request"))
            self.on_failure()

    def step(self) -> bool:
        """One turn. Returns False when there was nothing to do."""
        self._take_requests()
        self._poll_transfers()
        step = self.scheduler.schedule()
        self._begin_loads(step.loads)
        self._mark_started(item.sequence for item in step.work)
        sampled = self._fail_tokenless(self._runner.run(step.work) if step.work else {})
        work = [item for item in step.work if item.sequence.phase is Phase.RUNNING]
        gained = self.scheduler.advance(work, {seq_id: token.token_id for seq_id, token in sampled.items()})
        self.occupancy = self.scheduler.occupancy()
        self._publish(gained, sampled)
        self._extend_tickets(work)
        self.last_progress_s = self.clock()
        return bool(step.work or step.loads or step.preempted)

    def _take_requests(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _accept(self, job: Job) -> None:
        if self.failure is not None:
            self._deliver(job, Update(error=EngineError(self.failure)))
            return
        sequence = job.sequence
        self.counters.prompt_tokens += sequence.num_prompt
        ended = finish_of(sequence, self.scheduler.limits.max_model_len) if sequence.output_token_ids else None
        if ended is not None:
            self._end_without_work(job, ended)
            return
        self._jobs[sequence.seq_id] = job
        self.scheduler.add(sequence)
        if job.early_ticket and self.transfers is not None:
            self._deliver(job, Update(ticket=self.transfers.ledger.open(sequence)))

    def _end_without_work(self, job: Job, finish: Finish) -> None:
        """The tokens so far are the whole output: nothing is pulled, but the producer's blocks are let go."""
        if job.sequence.ticket is not None and self.transfers is not None:
            self.transfers.pulls.decline(job.sequence.ticket)
        if job.first_token is not None:
            self._deliver(job, job.first_token)
        self._end(job, Update(finish=finish))

    def _poll_transfers(self) -> None:
        if self.transfers is None:
            return
        now, ledger, pulls = self.clock(), self.transfers.ledger, self.transfers.pulls
        for event in self.transfers.connector.poll():
            if isinstance(event, Renewed):
                ledger.renew([event.ticket_id], now)
            elif isinstance(event, Released):
                ledger.forget(event.ticket_id)
                self._let_go(event.ticket_id)
            elif (sequence := pulls.end(event)) is not None:
                self._end_load(sequence, event)
        for ticket_id in ledger.expire(now):
            self._let_go(ticket_id)
        pulls.renew(self.scheduler.waiting, now)

    def _let_go(self, ticket_id: str) -> None:
        """A ticket ended: free the blocks of its sequence, or do so when that has been computed."""
        for sequence in [each for each in self.scheduler.held.values() if each.held_as == ticket_id]:
            self.scheduler.abort(sequence)
        for job in self._jobs.values():
            if job.sequence.held_as == ticket_id:
                job.sequence.is_orphan = True

    def _begin_loads(self, loads: list[Load]) -> None:
        for load in loads:
            assert self.transfers is not None
            self._mark(self._jobs[load.sequence.seq_id], Moment.KV_REQUESTED)
            refusal = self.transfers.pulls.begin(load)
            if refusal is not None:
                self._end_load(load.sequence, refusal)

    def _end_load(self, sequence: Sequence, event: Pulled | PullFailed) -> None:
        job = self._jobs.get(sequence.seq_id)
        is_fatal = isinstance(event, PullFailed) and not self._recompute and not sequence.has_hint
        if isinstance(event, Pulled):
            self.counters.transfers += 1
            self.counters.transfer_bytes += event.num_bytes
            self._runner.stage_in(sequence.blocks)
            self.scheduler.loaded(sequence)
        else:
            self._count_failure(event.cause, not is_fatal)
            self.scheduler.load_failed(sequence, recompute=not is_fatal)
        if job is None:
            return  # its client had left
        if isinstance(event, Pulled):
            self._after_pull(job, event)
        elif is_fatal:
            self._end(job, Update(error=TransferError(event.cause, event.message)))
        else:
            log.warning("request %s: %s; computing it here", sequence.request_id, event.message)
            self._send_first_token(job)

    def _after_pull(self, job: Job, event: Pulled) -> None:
        """The KV is here, and with it the first token, unless the request brought that itself."""
        self._mark(job, Moment.KV_READY)
        sequence = job.sequence
        if event.tail and not sequence.hold and not sequence.output_token_ids:
            first = msgspec.msgpack.decode(event.tail, type=FirstToken)
            sequence.append(first.token_id)
            job.first_token = Update(first.token_id, first.logprob)
            finish = finish_of(sequence, self.scheduler.limits.max_model_len)
            if finish is not None:
                self.scheduler.abort(sequence)
                self._end(job, replace(job.first_token, finish=finish))
                return
        self._send_first_token(job)

    def _send_first_token(self, job: Job) -> None:
        if job.first_token is not None:
            self._deliver(job, job.first_token)
            job.first_token = None

    def _count_failure(self, cause: str, recomputed: bool) -> None:
        self.counters.count(self.counters.transfer_failures, cause)
        self.counters.recomputed += recomputed

    def _mark_started(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if not sequence.output_token_ids:
                self._mark(self._jobs[sequence.seq_id], Moment.PREFILL_STARTED)

    def _mark(self, job: Job, moment: Moment) -> None:
        """A moment has come; only the first time counts."""
        if moment.value not in job.timeline.at_s:
            job.timeline.mark(moment, self.clock())
            self.durations.observe(moment, job.timeline)

    def _fail_tokenless(self, sampled: dict[int, Sampled | None]) -> dict[int, Sampled]:
        """End the sequences for which no token could be chosen; the others do not notice."""
        for seq_id in [seq_id for seq_id, token in sampled.items() if token is None]:
            job = self._jobs[seq_id]
            self.scheduler.abort(job.sequence)
            self._end(job, Update(error=EngineError("no token can be chosen: all are forbidden, or logits are NaN")))
        return {seq_id: token for seq_id, token in sampled.items() if token is not None}

    def _publish(self, gained: list[tuple[Sequence, Finish | None]], sampled: dict[int, Sampled]) -> None:
        now = self.clock()
        self.counters.generation_tokens += len(gained)
        for sequence, finish in gained:
            job = self._jobs[sequence.seq_id]
            token = sampled[sequence.seq_id]
            if sequence.num_output == 1:
                self._mark(job, Moment.PREFILL_DONE)
            if job.last_token_s is not None:
                self.durations.inter_token.observe(now - job.last_token_s)
            job.last_token_s = now
            ticket = self._issue(sequence, token) if sequence.phase is Phase.HELD else None
            update = Update(token.token_id, token.logprob, finish, ticket)
            if finish is None:
                self._deliver(job, update)
            else:
                self._end(job, update)

    def _issue(self, sequence: Sequence, token: Sampled) -> KVTicket | None:
        assert self.transfers is not None
        if sequence.is_orphan:
            self.scheduler.abort(sequence)
            return None
        self._runner.stage_out(sequence.blocks)
        return self.transfers.ledger.issue(sequence, FirstToken(token.token_id, token.logprob), self.clock())

    def _extend_tickets(self, work: list[Work]) -> None:
        """Let blocks travel that this step completed, of sequences whose tickets are out already."""
        if self.transfers is None:
            return
        for sequence in [item.sequence for item in work if item.sequence.held_as]:
            if sequence.phase is Phase.RUNNING:
                self._runner.stage_out(sequence.blocks)
                self.transfers.ledger.extend(sequence)

    def _end(self, job: Job, update: Update) -> None:
        """Deliver a job's last update, exactly once. Unless it ended in a hold, nobody may pull or wait for it."""
        self._jobs.pop(job.sequence.seq_id, None)
        if job.sequence.phase is not Phase.HELD:
            self._withdraw(job.sequence)
        self._mark(job, Moment.LAST_TOKEN)
        reason = update.finish.reason if update.finish is not None else "error"
        self.counters.count(self.counters.finished, reason)
        self._deliver(job, update)

    def _deliver(self, job: Job, update: Update) -> None:
        is_first = not job.is_announced and update.token_id is not None
        if is_first or update.finish is not None:
            update = replace(update, moments=job.timeline.since_received())
            job.is_announced = True
        job.deliver(update)

    def _ids_of(self, names: set[str]) -> list[int]:
        known = [job.sequence for job in self._jobs.values()] + list(self.scheduler.held.values())
        return [sequence.seq_id for sequence in known if {sequence.request_id, sequence.held_as} & names]

    def _abort(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            job, held = self._jobs.get(seq_id), self.scheduler.held.get(seq_id)
            sequence = held if job is None else job.sequence
            if sequence is None:
                continue
            self._withdraw(sequence)
            self.scheduler.abort(sequence)
            if job is not None:
                self._end(job, Update(finish=Finish("abort")))

    def _withdraw(self, sequence: Sequence) -> None:
        """Nobody may pull a sequence's blocks any more, and its own pull is given up."""
        if self.transfers is not None:
            self.transfers.ledger.withdraw(sequence.held_as)
            self.transfers.pulls.cancel(sequence)

    def _fail_all(self, error: FourhopError) -> None:
        self._take_requests()
        for job in list(self._jobs.values()):
            self._end(job, Update(error=error))

    def idle_timeout_s(self) -> float | None:
        """Until the next lease ends; for ever when there is none, since everything else sets `_wake`."""
        if self.transfers is None:
            return None
        expiry = self.transfers.ledger.next_expiry_in_s(self.clock())
        return RENEW_EVERY_S if self.scheduler.waiting else expiry
