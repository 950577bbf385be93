"""The engine's loop: one thread that owns the sequences, the blocks and the model.

`step` is the whole engine: take requests, poll transfers, schedule, run, publish. Other threads speak to it through
`submit`, `abort` and `ask`; it answers through each job's `deliver`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from fourhop.engine.jobs import Job, Jobs, Update
from fourhop.engine.sampled import Computed, Sampled
from fourhop.engine.scheduler import Scheduler
from fourhop.engine.sequence import Finish, Phase, Sequence, finish_of
from fourhop.engine.step import Work
from fourhop.engine.transfers import MIGRATED, Transfers
from fourhop.wire.errors import EngineError, FourhopError
from fourhop.wire.moments import Moment
from fourhop.wire.ticket import KVTicket
from fourhop.wire.worker import Lease

log = logging.getLogger(__name__)


class ModelRunner(Protocol):
    """A model over the KV pool: `runner.Runner`, or the toy."""

    def run(self, work: list[Work]) -> Computed:
        """Compute a step."""

    def stage_out(self, blocks: list[int]) -> None:
        """Make the pool's memory hold these blocks, for a connector to read."""

    def stage_in(self, blocks: list[int]) -> None:
        """Use what a connector wrote into these blocks of the pool's memory."""


class EngineLoop:
    """Runs steps on a thread of its own until `stop`, or until a step raises: then every open job fails by name,
    `failure` says why and `on_failure` is called; an engine is whole or it is down.

    Without transfers it neither holds nor pulls.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, jobs: Jobs) -> None:
        self.scheduler = scheduler
        self.jobs = jobs
        self.transfers: Transfers | None = None
        self.failure: str | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.after_step: Callable[[], None] = lambda: None
        self.last_progress_s = jobs.clock()
        self.occupancy = scheduler.occupancy()
        self._runner = runner
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    # Called from other threads.

    def start(self, transfers: Transfers | None) -> None:
        self.transfers = transfers
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the step at hand; open jobs fail. Blocks until it has ended."""
        self._stopping = True
        self.notify()
        self._thread.join()

    def submit(self, job: Job) -> None:
        self.ask(lambda: self._accept(job))

    def abort(self, seq_ids: Iterable[int]) -> None:
        """End sequences whose client is gone, wherever they are. Unknown ids are ignored."""
        ids = set(seq_ids)
        self.ask(lambda: self._abort(lambda sequence: sequence.seq_id in ids))

    def abort_named(self, names: Iterable[str]) -> None:
        """End sequences by request id or ticket id, held ones included."""
        wanted = set(names) - {""}
        self.ask(lambda: self._abort(lambda sequence: bool({sequence.request_id, sequence.held_as} & wanted)))

    def ask(self, question: Callable[[], None]) -> None:
        """Have something done on the loop's thread, between two steps."""
        self._inbox.append(question)
        self.notify()

    def notify(self) -> None:
        """There is news for the loop: wake it if it sleeps."""
        self._wake.set()

    @property
    def is_busy(self) -> bool:
        now = self.occupancy
        return bool(self._inbox) or now.num_running + now.num_waiting > 0

    # The loop's own thread; what others `ask` for.

    def migrate(self, names: list[str]) -> int:
        """End running sequences of these request ids with tickets for what they have computed."""
        wanted = set(names) - {""}
        jobs = [job for job in self.jobs if job.sequence.request_id in wanted]
        for job in jobs:
            ticket = self.transfers.migrate(job.sequence) if self.transfers is not None else None
            if self.transfers is None:
                self.scheduler.abort(job.sequence)
            self._end(job, Update(finish=MIGRATED, ticket=ticket))
        return len(jobs)

    def leases(self) -> list[Lease]:
        return [] if self.transfers is None else self.transfers.ledger.leases(self.jobs.clock())

    def renew(self, ticket_ids: list[str]) -> list[KVTicket]:
        return [] if self.transfers is None else self.transfers.ledger.renew(ticket_ids, self.jobs.clock())

    def hold_prefix(self, sequence: Sequence) -> KVTicket | None:
        return None if self.transfers is None else self.transfers.hold_prefix(sequence)

    # The loop's own thread; the loop itself.

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
        if self.transfers is not None:
            self.transfers.poll()
        step = self.scheduler.schedule()
        if self.transfers is not None:
            self.transfers.begin(step.loads)
        self._open_tickets(step.work)
        self._mark_started(step.work)
        computed = self._runner.run(step.work) if step.work else Computed({})
        sampled = self._fail_tokenless(computed.sampled)
        self._note_prompts(step.work, computed)
        work = [item for item in step.work if item.sequence.phase is Phase.RUNNING]
        gained = self.scheduler.advance(work, {seq_id: token.token_id for seq_id, token in sampled.items()})
        self.occupancy = self.scheduler.occupancy()
        self._publish(gained, sampled)
        if self.transfers is not None:
            self.transfers.extend(work)
        self.after_step()
        self.last_progress_s = self.jobs.clock()
        return bool(step.work or step.loads or step.preempted)

    def idle_timeout_s(self) -> float | None:
        """How long to sleep without an event; None is for ever, since everything else wakes the loop."""
        return None if self.transfers is None else self.transfers.idle_timeout_s()

    def _take_requests(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _accept(self, job: Job) -> None:
        if self.failure is not None:
            self.jobs.deliver(job, Update(error=EngineError(self.failure)))
            return
        sequence = job.sequence
        self.jobs.counters.prompt_tokens += sequence.num_prompt
        ended = finish_of(sequence, self.scheduler.limits.max_model_len) if sequence.output_token_ids else None
        if ended is not None:
            # The tokens so far are the whole output: nothing is computed, and a ticket is not needed.
            self.jobs.deliver_first_token(job)
            self._end(job, Update(finish=ended))
            return
        self.jobs.add(job)
        self.scheduler.add(sequence)

    def _open_tickets(self, work: list[Work]) -> None:
        """Give early tickets to sequences that have begun. One that waits here must not have a consumer wait for it:
        the consumer's blocks could be what the sequences that are held here are waiting for."""
        for sequence in [item.sequence for item in work if not item.sequence.held_as]:
            job = self.jobs.of(sequence)
            if job is not None and job.early_ticket and self.transfers is not None:
                self.jobs.deliver(job, Update(ticket=self.transfers.open(sequence)))

    def _mark_started(self, work: list[Work]) -> None:
        for sequence in [item.sequence for item in work if not item.sequence.output_token_ids]:
            if (job := self.jobs.of(sequence)) is not None:
                self.jobs.mark(job, Moment.PREFILL_STARTED)

    def _fail_tokenless(self, sampled: dict[int, Sampled | None]) -> dict[int, Sampled]:
        """End the sequences for which no token could be chosen; the others do not notice."""
        for job in [job for job in self.jobs if sampled.get(job.sequence.seq_id, job) is None]:
            self.scheduler.abort(job.sequence)
            self._end(job, Update(error=EngineError("no token can be chosen: all are forbidden, or logits are NaN")))
        return {seq_id: token for seq_id, token in sampled.items() if token is not None}

    def _note_prompts(self, work: list[Work], computed: Computed) -> None:
        for item in work:
            if (entries := computed.prompt_logprobs.get(item.sequence.seq_id)) is not None:
                item.sequence.note_prompt_logprobs(item.start, entries)

    def _publish(self, gained: list[tuple[Sequence, Finish | None]], sampled: dict[int, Sampled]) -> None:
        """Tell every job what it gained in this step."""
        for sequence, finish in gained:
            job = self.jobs.of(sequence)
            assert job is not None, "a running sequence has a job"
            token, ticket = sampled[sequence.seq_id], None
            if sequence.phase is Phase.HELD and self.transfers is not None:
                ticket = self.transfers.issue(sequence, token)
            self.jobs.note_token(job)
            update = Update(
                token.token_id, token.logprob, finish, ticket, prompt_logprobs=sequence.take_prompt_logprobs()
            )
            if finish is None:
                self.jobs.deliver(job, update)
            else:
                self._end(job, update)

    def _abort(self, is_wanted: Callable[[Sequence], bool]) -> None:
        for job in [job for job in self.jobs if is_wanted(job.sequence)]:
            self.scheduler.abort(job.sequence)
            self._end(job, Update(finish=Finish("abort")))
        for sequence in [held for held in self.scheduler.held.values() if is_wanted(held)]:
            if self.transfers is not None:
                self.transfers.abandon(sequence)
            self.scheduler.abort(sequence)

    def _end(self, job: Job, update: Update) -> None:
        """A job's last update. Unless it ended in a hold, nobody may pull its blocks or wait for its pull."""
        if self.transfers is not None and job.sequence.phase is not Phase.HELD:
            self.transfers.abandon(job.sequence)
        self.jobs.end(job, update)

    def _fail_all(self, error: FourhopError) -> None:
        self._take_requests()
        for job in self.jobs:
            self._end(job, Update(error=error))
