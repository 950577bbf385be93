"""Sending jobs when they are due, whatever became of the others (open loop), and gathering their records."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from fourhop.bench.bodies import Bodies, Talk
from fourhop.bench.client import CANCELLED, Call, Client
from fourhop.bench.record import Record
from fourhop.bench.workload import Job, Vocabulary

AHEAD_BYTES = 256 << 20
"""Bodies are made before the run, up to this size, so that making them delays no time stamp; the rest as it goes on."""


class Watch(Protocol):
    """What is told while requests run."""

    def token(self) -> None:
        """Output arrived."""

    def ended(self, record: Record) -> None:
        """A request ended."""


@dataclass(frozen=True)
class Options:
    """`prefix` begins every request's name; `keeps_text` leaves the answers' texts in their records."""

    prefix: str = "bench-"
    max_concurrency: int | None = None
    think_time_s: float = 0.0
    keeps_text: bool = False


@dataclass(frozen=True)
class Planned:
    """A job that is due at `due_s` after the start, with the body of its first turn."""

    name: str
    job: Job
    due_s: float
    talk: Talk
    body: bytes


@dataclass
class Run:
    """What came of the jobs. `is_cut`: the run was stopped before its end."""

    start_s: float
    end_s: float = 0.0
    records: list[Record] = field(default_factory=list)
    is_cut: bool = False

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class Driver:
    """Drives one target, one run at a time."""

    def __init__(self, client: Client, bodies: Bodies, vocabulary: Vocabulary, watch: Watch, options: Options) -> None:
        self._client = client
        self._bodies = bodies
        self._vocabulary = vocabulary
        self._watch = watch
        self._options = options
        self._slots = nullcontext() if options.max_concurrency is None else asyncio.Semaphore(options.max_concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._run = Run(0.0)

    async def run(self, schedule: Iterable[tuple[float, Job]]) -> Run:
        """Send every job when it is due, in seconds after the start, and wait for the last answer."""
        ahead = self._prepare(schedule)
        run = self._run = Run(self._client.clock())
        async with asyncio.TaskGroup() as group:
            self._start(group, self._feed(group, ahead))
        run.end_s = self._client.clock()
        return run

    def stop(self) -> None:
        """Send nothing more and end what is open: `run` returns with what there is."""
        self._run.is_cut = True
        for task in self._tasks:
            task.cancel()

    def _start(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        task = group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _feed(self, group: asyncio.TaskGroup, ahead: Iterator[Planned]) -> None:
        for planned in ahead:
            due_s = self._run.start_s + planned.due_s
            if (pause_s := due_s - self._client.clock()) > 0:
                await asyncio.sleep(pause_s)
            self._start(group, self._converse(planned, due_s))

    async def _converse(self, planned: Planned, due_s: float) -> None:
        """All turns of a job, each after the answer to the one before. A turn that fails is the last."""
        talk, body = planned.talk, planned.body
        for number, turn in enumerate(planned.job.turns):
            if number:
                due_s = self._client.clock() + self._options.think_time_s
                await asyncio.sleep(self._options.think_time_s)
                talk.ask(turn)
                body = self._bodies.body(talk, turn.num_output)
            ready_s = self._client.clock()
            async with self._slots:
                name = f"{planned.name}-{number}" if number else planned.name
                call = Call(name, body, talk.num_asked, number, due_s, ready_s)
                record, ids = await self._client.ask(call, self._watch.token)
            self._end(record)
            if not record.is_good:
                return
            talk.answered(ids, record.text)

    def _end(self, record: Record) -> None:
        kept = record if self._options.keeps_text else dataclasses.replace(record, text="")
        self._run.records.append(kept)
        self._run.is_cut |= record.error == CANCELLED
        self._watch.ended(kept)

    def _prepare(self, schedule: Iterable[tuple[float, Job]]) -> Iterator[Planned]:
        """The schedule with its bodies made: as many as AHEAD_BYTES before this returns, then one for each taken."""
        planned = (self._plan(number, due_s, job) for number, (due_s, job) in enumerate(schedule))
        ahead: deque[Planned] = deque()
        num_bytes = 0
        for one in planned:
            ahead.append(one)
            num_bytes += len(one.body)
            if num_bytes >= AHEAD_BYTES:
                break
        return _refilled(ahead, planned)

    def _plan(self, number: int, due_s: float, job: Job) -> Planned:
        name = f"{self._options.prefix}{number}"
        talk = Talk(self._vocabulary, self._bodies.is_chat, name)
        talk.ask(job.turns[0])
        body = self._bodies.body(talk, job.turns[0].num_output)
        if len(job.turns) == 1:
            # Nothing follows, so the ids are not needed again: the body is all that is kept.
            talk.forget()
            job = Job((dataclasses.replace(job.turns[0], ids=()),), job.at_s)
        return Planned(name, job, due_s, talk, body)


def _refilled(ahead: deque[Planned], rest: Iterator[Planned]) -> Iterator[Planned]:
    while ahead:
        yield ahead.popleft()
        if (more := next(rest, None)) is not None:
            ahead.append(more)
