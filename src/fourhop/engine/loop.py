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

from fourhop.engine.ledger import HoldLedger
from fourhop.engine.sampler import Sampled
from fourhop.engine.scheduler import Load, Scheduler, Work
from fourhop.engine.sequence import Finish, Phase, Sequence, finish_of
from fourhop.kv.connector import Pulled, PullFailed, Released
from fourhop.wire.errors import EngineError, FourhopError, TransferError
from fourhop.wire.logprobs import TokenLogprob
from fourhop.wire.moments import Moment, Timeline
from fourhop.wire.ticket import KVTicket

log = logging.getLogger(__name__)


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

    The first and the last update carry the moments so far.
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

    `first_token` is one that prefill sampled elsewhere and nobody has sent yet: it goes out when its KV is here.
    """

    sequence: Sequence
    deliver: Callable[[Update], object]
    timeline: Timeline
    first_token: Update | None = None
    is_announced: bool = False


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
    `failure` says why; an engine is whole or it is down."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        clock: Callable[[], float],
        recompute: bool,
    ) -> None:
        self.scheduler = scheduler
        self.ledger: HoldLedger | None = None
        self.counters = Counters()
        self.failure: str | None = None
        self.last_progress_s = clock()
        self.occupancy = scheduler.occupancy()
        self._runner = runner
        self._clock = clock
        self._recompute = recompute
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._jobs: dict[int, Job] = {}
        self._pulls: dict[str, Job | None] = {}  # by ticket id; None for a ticket that was declined
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    # Called from other threads.

    def start(self, ledger: HoldLedger | None) -> None:
        """Begin. Without a ledger this engine neither holds nor pulls."""
        self.ledger = ledger
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the step at hand; open jobs fail. Blocks until it has ended."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def submit(self, job: Job) -> None:
        self._inbox.append(lambda: self._accept(job))
        self._wake.set()

    def abort(self, seq_ids: Iterable[int]) -> None:
        """End sequences whose client is gone, wherever they are. Unknown ids are ignored."""
        ids = list(seq_ids)
        self._inbox.append(lambda: self._abort(ids))
        self._wake.set()

    def abort_named(self, names: Iterable[str]) -> None:
        """End sequences by request id or ticket id, held ones included."""
        wanted = set(names) - {""}
        self._inbox.append(lambda: self._abort(self._ids_of(wanted)))
        self._wake.set()

    def count_refusal(self, cause: str, *, recomputed: bool) -> None:
        """A ticket did not verify, so it never became a job's."""
        self._inbox.append(lambda: self._count_failure(cause, recomputed))
        self._wake.set()

    def notify(self) -> None:
        """A connector has news."""
        self._wake.set()

    @property
    def is_busy(self) -> bool:
        now = self.occupancy
        return bool(self._inbox) or now.num_running + now.num_waiting > 0

    # The loop's own thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                if not self.step():
                    self._wake.wait(self._idle_timeout_s())
            self._fail_all(EngineError("the engine is shutting down"))
        except Exception as error:  # a worker loop fails one request or the process, never half
            log.exception("the engine loop failed")
            self.failure = f"the engine loop failed: {type(error).__name__}"
            self._fail_all(EngineError("the engine failed while it computed this request"))

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
        self.last_progress_s = self._clock()
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

    def _end_without_work(self, job: Job, finish: Finish) -> None:
        """The tokens so far are the whole output: nothing is pulled, but the producer's blocks are let go."""
        ticket = job.sequence.ticket
        if ticket is not None and self.ledger is not None and ticket.ticket_id not in self._pulls:
            self._pulls[ticket.ticket_id] = None
            self.ledger.decline(ticket)
        if job.first_token is not None:
            self._deliver(job, job.first_token)
        self._end(job, Update(finish=finish))

    def _poll_transfers(self) -> None:
        if self.ledger is None:
            return
        for event in self.ledger.poll(self._clock()):
            if isinstance(event, Released):
                self._let_go(event.ticket_id)
            elif (job := self._pulls.pop(event.ticket_id, None)) is not None:
                self._end_load(job, event)

    def _let_go(self, ticket_id: str) -> None:
        """Free the blocks of a hold that was pulled or expired."""
        for sequence in [held for held in self.scheduler.held.values() if held.held_as == ticket_id]:
            self.scheduler.abort(sequence)

    def _begin_loads(self, loads: list[Load]) -> None:
        for load in loads:
            ticket = load.sequence.ticket
            assert ticket is not None and self.ledger is not None
            job = self._jobs[load.sequence.seq_id]
            job.timeline.mark(Moment.KV_REQUESTED, self._clock())
            if ticket.ticket_id in self._pulls:
                self._end_load(job, PullFailed(ticket.ticket_id, "used", "another request is pulling this ticket"))
            else:
                self._pulls[ticket.ticket_id] = job
                self.ledger.pull(ticket, load.block_ids, load.skip_blocks)

    def _end_load(self, job: Job, event: Pulled | PullFailed) -> None:
        sequence = job.sequence
        if isinstance(event, Pulled):
            self.counters.transfers += 1
            self.counters.transfer_bytes += event.num_bytes
            self._runner.stage_in(sequence.blocks)
            self.scheduler.loaded(sequence)
        else:
            self._count_failure(event.cause, self._recompute)
            self.scheduler.load_failed(sequence, recompute=self._recompute)
        if sequence.phase is not Phase.FINISHED:
            self._after_load(job, event)
        elif isinstance(event, PullFailed) and sequence.seq_id in self._jobs:
            self._end(job, Update(error=TransferError(event.cause, event.message)))

    def _after_load(self, job: Job, event: Pulled | PullFailed) -> None:
        """The sequence goes on, with pulled blocks or by recomputing them."""
        if isinstance(event, Pulled):
            job.timeline.mark(Moment.KV_READY, self._clock())
        else:
            log.warning("request %s: %s; recomputing", job.sequence.request_id, event.message)
        if job.first_token is not None:
            self._deliver(job, job.first_token)
            job.first_token = None

    def _count_failure(self, cause: str, recomputed: bool) -> None:
        self.counters.count(self.counters.transfer_failures, cause)
        self.counters.recomputed += recomputed

    def _mark_started(self, sequences: Iterable[Sequence]) -> None:
        now = self._clock()
        for sequence in sequences:
            if not sequence.output_token_ids:
                self._jobs[sequence.seq_id].timeline.mark(Moment.PREFILL_STARTED, now)

    def _fail_tokenless(self, sampled: dict[int, Sampled | None]) -> dict[int, Sampled]:
        """End the sequences for which no token could be chosen; the others do not notice."""
        for seq_id in [seq_id for seq_id, token in sampled.items() if token is None]:
            job = self._jobs[seq_id]
            self.scheduler.abort(job.sequence)
            self._end(job, Update(error=EngineError("no token can be chosen: all are forbidden, or logits are NaN")))
        return {seq_id: token for seq_id, token in sampled.items() if token is not None}

    def _publish(self, gained: list[tuple[Sequence, Finish | None]], sampled: dict[int, Sampled]) -> None:
        now = self._clock()
        self.counters.generation_tokens += len(gained)
        for sequence, finish in gained:
            job = self._jobs[sequence.seq_id]
            token = sampled[sequence.seq_id]
            if sequence.num_output == 1:
                job.timeline.mark(Moment.PREFILL_DONE, now)
            ticket = self._issue(job, token) if sequence.phase is Phase.HELD else None
            update = Update(token.token_id, token.logprob, finish, ticket)
            if finish is None:
                self._deliver(job, update)
            else:
                self._end(job, update)

    def _issue(self, job: Job, token: Sampled) -> KVTicket:
        assert self.ledger is not None
        self._runner.stage_out(job.sequence.blocks)
        ticket = self.ledger.issue(job.sequence, token, self._clock())
        job.sequence.held_as = ticket.ticket_id
        return ticket

    def _end(self, job: Job, update: Update) -> None:
        """Deliver a job's last update, exactly once."""
        self._jobs.pop(job.sequence.seq_id, None)
        job.timeline.mark(Moment.LAST_TOKEN, self._clock())
        reason = update.finish.reason if update.finish is not None else "error"
        self.counters.count(self.counters.finished, reason)
        self._deliver(job, update)

    def _deliver(self, job: Job, update: Update) -> None:
        if not job.is_announced or update.finish is not None:
            update = replace(update, moments=job.timeline.since_received())
            job.is_announced = True
        job.deliver(update)

    def _ids_of(self, names: set[str]) -> list[int]:
        known = [job.sequence for job in self._jobs.values()] + list(self.scheduler.held.values())
        return [sequence.seq_id for sequence in known if {sequence.request_id, sequence.held_as} & names]

    def _abort(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            held = self.scheduler.held.get(seq_id)
            if held is not None and self.ledger is not None:
                self.ledger.withdraw(held.held_as)
                self.scheduler.abort(held)
            elif (job := self._jobs.get(seq_id)) is not None:
                self.scheduler.abort(job.sequence)
                self._end(job, Update(finish=Finish("abort")))

    def _fail_all(self, error: FourhopError) -> None:
        self._take_requests()
        for job in list(self._jobs.values()):
            self._end(job, Update(error=error))

    def _idle_timeout_s(self) -> float | None:
        """Until the next lease ends; for ever when there is none, since everything else sets `_wake`."""
        return None if self.ledger is None else self.ledger.next_expiry_in_s(self._clock())
