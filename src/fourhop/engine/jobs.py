"""Jobs: sequences that somebody waits for, and what they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from fourhop.engine.durations import Durations
from fourhop.engine.sequence import Finish, Sequence
from fourhop.wire.errors import FourhopError
from fourhop.wire.logprobs import PromptLogprobs, TokenLogprob
from fourhop.wire.moments import Moment, Timeline
from fourhop.wire.ticket import KVTicket


@dataclass(frozen=True)
class Update:
    """What a job gained: a token, its end, or an error instead of everything else.

    The first with a token and the last carry the moments so far; the first also what was asked of the prompt.
    """

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    finish: Finish | None = None
    ticket: KVTicket | None = None
    error: FourhopError | None = None
    moments: dict[str, float] | None = None
    prompt_logprobs: PromptLogprobs | None = None


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


class Jobs:
    """The open jobs by sequence id. Each ends exactly once, through `end`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.counters = Counters()
        self.durations = Durations()
        self._open: dict[int, Job] = {}

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def add(self, job: Job) -> None:
        self._open[job.sequence.seq_id] = job

    def of(self, sequence: Sequence) -> Job | None:
        """Who waits for a sequence; None when its client has left or has all it will get."""
        return self._open.get(sequence.seq_id)

    def mark(self, job: Job, moment: Moment) -> None:
        """A moment has come; only the first time counts."""
        if moment.value not in job.timeline.at_s:
            job.timeline.mark(moment, self.clock())
            self.durations.observe(moment, job.timeline)

    def deliver(self, job: Job, update: Update) -> None:
        is_first = not job.is_announced and update.token_id is not None
        if is_first or update.finish is not None:
            update = replace(update, moments=job.timeline.since_received())
            job.is_announced = True
        job.deliver(update)

    def deliver_first_token(self, job: Job) -> None:
        """Send the token that prefill sampled elsewhere, if nobody has sent it yet."""
        if job.first_token is not None:
            self.deliver(job, job.first_token)
            job.first_token = None

    def note_token(self, job: Job) -> None:
        """A token was sampled for a job."""
        now = self.clock()
        self.counters.generation_tokens += 1
        if job.sequence.num_output == 1:
            self.mark(job, Moment.PREFILL_DONE)
        elif job.last_token_s is None and Moment.KV_READY.value in job.timeline.at_s:
            self.mark(job, Moment.DECODE_STARTED)
        if job.last_token_s is not None:
            self.durations.inter_token.observe(now - job.last_token_s)
        job.last_token_s = now

    def end(self, job: Job, update: Update) -> None:
        """Deliver a job's last update."""
        self._open.pop(job.sequence.seq_id, None)
        self.mark(job, Moment.LAST_TOKEN)
        reason = update.finish.reason if update.finish is not None else "error"
        self.counters.count(self.counters.finished, reason)
        self.deliver(job, update)
