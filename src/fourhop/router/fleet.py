"""The engines: who is alive, and why the others are not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from heapq import nsmallest

from fourhop.router.backlog import Arrivals
from fourhop.router.config import RouterConfig
from fourhop.router.costs import EngineCosts
from fourhop.router.policy import Candidate
from fourhop.router.ranks import SHORT, Ranks
from fourhop.router.verdict import Verdict, backoff_s, judge
from fourhop.router.worker import NOT_SEEN, Worker, differ, is_same
from fourhop.service.tasks import end_tasks
from fourhop.wire.errors import FourhopError, PeerTimeout, Unavailable
from fourhop.wire.worker import WorkerInfo

log = logging.getLogger(__name__)

TIMEOUTS_TO_BE_DOWN = 2
"""A look that times out may have met a busy machine; two in a row are an engine that hangs."""

LAST_LOOK_S = 0.1
"""The least patience with a look at an engine that is about to be given up."""


@dataclass
class Fleet:
    """All engines. An engine that fails is down at once and is up again when it answers a look after its backoff.

    All have one model, that of the first engine that is up: what one began another may have to go on with. An engine
    that two URLs lead to is used at the first, so that its load is known and what it cannot do is not tried twice.
    One that was neither seen nor heard for `dead_after_s` is given up: whatever waits for it ends in PeerTimeout.
    `on_up` is awaited with each engine that comes up or turns out to live a new life. `num_changes` counts changes of
    which engines there are and what they can take.
    """

    config: RouterConfig
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    on_up: Callable[[Worker], Awaitable[None]] | None = None
    workers: dict[str, Worker] = field(default_factory=dict)
    num_given_up: int = 0
    num_changes: int = 0
    costs: EngineCosts = field(default_factory=EngineCosts)
    arrivals: Arrivals = field(default_factory=Arrivals)
    num_prefill: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    _ending: set[asyncio.Task[None]] = field(default_factory=set)
    _watchers: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def start(self, workers: list[Worker]) -> None:
        """Look at every engine once, then watch them."""
        self.adopt(workers)
        await asyncio.gather(*(self.look(worker) for worker in workers))
        for worker in workers:
            self._compare(worker)
        for worker in workers:
            self._begin(worker, self._watch(worker))

    def adopt(self, workers: list[Worker]) -> None:
        """These engines belong to the fleet from now on."""
        for worker in workers:
            self.workers[worker.name] = worker
            worker.last_seen_s = self.clock()
            worker.costs = EngineCosts(self.costs)
        self._order()

    def join(self, workers: list[Worker]) -> None:
        """These engines too. Nobody waits for the first look at them: each gets requests when it was seen."""
        self.adopt(workers)
        for worker in workers:
            self._begin(worker, self._meet(worker))

    def drop(self, worker: Worker) -> None:
        """Forget an engine that nothing refers to."""
        del self.workers[worker.name]
        worker.ranks = None
        self.ranks.drop(worker.name)
        self._order()
        watcher = self._watchers.pop(worker.name, None)
        if watcher is not None:
            watcher.cancel()
            self._ending.add(watcher)
            watcher.add_done_callback(self._ending.discard)
        worker.control.cut()

    def find(self, name: str | None) -> Worker | None:
        """The engine of this name, if it still is one of ours: a request may name one that has left."""
        return None if name is None else self.workers.get(name)

    async def close(self) -> None:
        await end_tasks([*self._watchers.values(), *self._ending])

    def _order(self) -> None:
        """Count the engines, and keep them in order while there are many."""
        self.num_changes += 1
        self.num_prefill = sum(worker.role == "prefill" for worker in self.workers.values())
        for worker in self.workers.values():
            worker.ranks = self.ranks if self.is_large else None
            worker.rank()

    def _begin(self, worker: Worker, watch: Coroutine[None, None, None]) -> None:
        self._watchers[worker.name] = asyncio.create_task(watch, name=f"watch {worker.name}")

    def candidates(self, excluded: frozenset[str] = frozenset()) -> list[Candidate]:
        return [
            worker.as_candidate()
            for worker in self.workers.values()
            if worker.is_usable and worker.name not in excluded
        ]

    @property
    def is_large(self) -> bool:
        """Whether there are so many engines that a choice looks at some only."""
        return len(self.workers) > SHORT

    def shortlist(self, excluded: frozenset[str], *also: str | None) -> list[Candidate]:
        """The candidates worth looking at; see `few`."""
        return [worker.as_candidate() for worker in self.few(excluded, *also)]

    def few(self, excluded: frozenset[str], *also: str | None) -> list[Worker]:
        """The engines worth looking at: of each kind the few with the least to do, and those that are named."""
        workers = self.workers
        if not self.is_large:
            return [one for one in workers.values() if one.is_usable and one.name not in excluded]
        names = self.ranks.least(lambda name: workers[name].is_usable and name not in excluded)
        known = [name for name in also if name is not None and name in workers]
        more = [name for name in known if name not in names and name not in excluded]
        if len(more) > SHORT:
            more = nsmallest(SHORT, more, key=lambda name: workers[name].in_flight)
        names += [name for name in dict.fromkeys(more) if workers[name].is_usable]
        return [workers[name] for name in names]

    def succeeded(self, worker: Worker) -> None:
        worker.num_faults = 0

    def failed(self, worker: Worker, error: FourhopError) -> Verdict:
        """Note what a request met at this engine.

        Two stock vLLMs may differ where tokens are nearly as likely, and what one holds is then of no use to the other.
        """
        verdict = judge(error)
        if verdict is Verdict.FLEET and worker.info is None:
            return Verdict.TRANSFER
        if verdict is Verdict.FAULT:
            self._take_down(worker, error.message)
        return verdict

    async def look(self, worker: Worker) -> None:
        """See whether the engine is well, and who it is."""
        self._listen(worker)
        try:
            info = await self._check(worker)
        except PeerTimeout as error:
            worker.num_timeouts += 1
            if worker.num_timeouts >= TIMEOUTS_TO_BE_DOWN:
                self._take_down(worker, error.message)
            self._not_seen(worker)
        except FourhopError as error:
            self._take_down(worker, error.message)
            self._not_seen(worker)
        else:
            worker.num_timeouts = 0
            worker.last_seen_s = self.clock()
            await self._seen(worker, info)

    def _listen(self, worker: Worker) -> None:
        """Note that the engine sent something since this was last asked, if it did."""
        if worker.num_heard > worker.num_heard_before:
            worker.num_heard_before = worker.num_heard
            worker.last_seen_s = self.clock()

    async def _check(self, worker: Worker) -> WorkerInfo | None:
        try:
            async with asyncio.timeout(self._patience_s(worker)):
                return await worker.control.check()
        except TimeoutError:
            raise PeerTimeout(f"timed out waiting to hear from {worker.name}") from None

    def _patience_s(self, worker: Worker) -> float | None:
        """How long a look may take: its own timeouts, but not beyond the time at which the engine is given up."""
        if worker.num_timeouts == 0:
            return None
        return max(LAST_LOOK_S, worker.last_seen_s + self.config.dead_after_s - self.clock())

    def _not_seen(self, worker: Worker) -> None:
        self._listen(worker)
        if worker.in_flight and self.clock() - worker.last_seen_s >= self.config.dead_after_s:
            self._take_down(worker, f"not heard of for {self.config.dead_after_s:.0f} s")
            if worker.given_up_s != worker.last_seen_s:
                worker.given_up_s = worker.last_seen_s
                self.num_given_up += 1
                log.warning("engine %s is given up with %d requests", worker.name, worker.in_flight)
            worker.control.cut()

    async def _seen(self, worker: Worker, info: WorkerInfo | None) -> None:
        is_new = info is not None and worker.epoch not in ("", info.epoch)
        if is_new:
            log.warning("engine %s restarted", worker.name)
        worker.info = info
        if worker.sizes != worker.known_sizes:
            worker.known_sizes = worker.sizes
            self.num_changes += 1
        worker.rank()
        if self._compare(worker):
            return
        is_back = worker.down is not None and self.clock() >= worker.retry_at_s
        if is_back:
            log.info("engine %s is up", worker.name)
            worker.down = None
        if (is_back or is_new) and self.on_up is not None:
            await self.on_up(worker)

    def _compare(self, worker: Worker) -> bool:
        """True if the engine is one that is listed before it and up, or has another model: then it is down."""
        for other in self.workers.values():
            if other is worker:
                return False
            if other.down is not None:
                continue
            if is_same(worker, other):
                self._take_down(worker, f"it is {other.name} at another URL")
                return True
            if differ(worker, other):
                self._take_down(worker, f"it has {worker.model}, but {other.name} has {other.model}")
                return True
        return False

    def _take_down(self, worker: Worker, reason: str) -> None:
        if worker.down is None:
            worker.num_faults += 1
            worker.retry_at_s = self.clock() + backoff_s(worker.num_faults, self.config.probe_backoff_s)
        if worker.down in (None, NOT_SEEN):
            log.warning("engine %s is down: %s", worker.name, reason)
        worker.down = reason

    async def _watch(self, worker: Worker) -> None:
        num_ill = 0
        while True:
            num_ill = 0 if worker.down is None and worker.num_timeouts == 0 else num_ill + 1
            await self.sleep(backoff_s(num_ill, self.config.probe_backoff_s) or self.config.probe_interval_s)
            await self._try_look(worker)

    async def _meet(self, worker: Worker) -> None:
        await self._try_look(worker)
        await self._watch(worker)

    async def _try_look(self, worker: Worker) -> None:
        try:
            await self.look(worker)
        except Exception:  # a task of its own: nobody else would tell, and nobody look again
            log.exception("a look at %s failed", worker.name)

    def unavailable(self) -> Unavailable:
        """Nothing can serve a request: what is down and why, and when the next look may find it up."""
        reasons = [
            f"{worker.name} ({worker.role}): {worker.idle_reason}"
            for worker in self.workers.values()
            if worker.idle_reason
        ]
        other = "every engine is busy" if self.workers else "none is known yet"
        return Unavailable(
            "no engine can serve the request: " + ("; ".join(reasons) or other),
            retry_after_s=self.config.probe_backoff_s,
        )
