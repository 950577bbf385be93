"""The engines: who is alive, why the others are not, and what each is doing for us."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import nsmallest
from typing import Any, Protocol

from fourhop.router.backlog import Arrivals, Backlog
from fourhop.router.config import RouterConfig
from fourhop.router.costs import EngineCosts
from fourhop.router.handoff.kinds import Name
from fourhop.router.handoff.protocol import Endpoint
from fourhop.router.policy import Candidate, EngineRole
from fourhop.router.ranks import SHORT, Ranks
from fourhop.tokens.server import TokenServer
from fourhop.tokens.worker import ServedModel
from fourhop.wire.errors import EnginesDisagree, FourhopError, PeerTimeout, TransferError, Unavailable
from fourhop.wire.ticket import KVTicket
from fourhop.wire.worker import Leases, PrefixRequest, WorkerInfo

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.25
TIMEOUTS_TO_BE_DOWN = 2
"""A look that times out may have met a busy machine; two in a row are an engine that hangs."""

LAST_LOOK_S = 0.1
"""The least patience with a look at an engine that is about to be given up."""


class Control(Protocol):
    """What a router asks of an engine besides tokens; see `tokens.worker.RemoteWorker`."""

    @property
    def engine_id(self) -> str: ...

    @property
    def served(self) -> ServedModel | None: ...

    async def check(self) -> WorkerInfo | None: ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def refuse(self, transfer: dict[str, Any]) -> None: ...

    async def leases(self) -> Leases: ...

    async def renew(self, ticket_ids: list[str]) -> list[KVTicket]: ...

    async def hold_prefix(self, request: PrefixRequest) -> dict[str, Any] | None: ...

    async def migrate(self, request_ids: list[str]) -> int: ...

    def cut(self) -> None: ...


class Verdict(Enum):
    """What an error says of the engine that it came from."""

    REQUEST = auto()  # the request is wrong: the engine is well, another would say the same
    BUSY = auto()  # back-pressure: well, but not now
    TRANSFER = auto()  # KV did not arrive: the engine can still compute it
    FLEET = auto()  # two engines disagree: no third one can settle which is right
    FAULT = auto()  # the engine failed, or the way to it


def judge(error: FourhopError) -> Verdict:
    if error.type == TransferError.type:
        return Verdict.TRANSFER
    if error.type == EnginesDisagree.type:
        return Verdict.FLEET
    if error.status in (429, 503):
        return Verdict.BUSY
    return Verdict.REQUEST if error.status < 500 else Verdict.FAULT


def backoff_s(num_faults: int, longest_s: float) -> float:
    """How long to leave an engine alone after so many faults without a success between them."""
    return min(longest_s, FIRST_BACKOFF_S * 2.0 ** min(num_faults - 1, 16)) if num_faults else 0.0


def _differ(one: Worker, other: Worker) -> bool:
    """True for other weights. Names alone may differ, as paths do; fingerprints alone too, by the size of a block.

    A stock vLLM tells its model's name and where its files are.
    """
    if one.info and other.info:
        return one.info.model != other.info.model and one.info.fingerprint != other.info.fingerprint
    mine, others = one.control.served, other.control.served
    return mine is not None and others is not None and mine.id != others.id and mine.root != others.root


@dataclass
class Worker:
    """One engine. `down` says why it gets no requests, None when it does; a draining one is well but gets none either.

    `num_heard` counts the chunks that it sent, of which `num_heard_before` are known to the fleet: an engine whose
    streams go on is alive, whatever its health says. `last_seen_s` is when it was last known to be. `handoff` is how it
    hands KV over if it is a stock vLLM, which does not tell (`handoff.kinds`); None: it does not.
    """

    name: str
    role: EngineRole
    server: TokenServer
    control: Control
    handoff: Name | None = None
    endpoint: Endpoint = field(default_factory=Endpoint)
    info: WorkerInfo | None = None
    down: str | None = "not seen yet"
    is_draining: bool = False
    in_flight: int = 0
    num_placed: int = 0
    num_heard: int = 0
    num_heard_before: int = 0
    num_faults: int = 0
    num_timeouts: int = 0
    last_seen_s: float = 0.0
    retry_at_s: float = 0.0
    costs: EngineCosts = field(default_factory=EngineCosts)
    backlog: Backlog = field(default_factory=Backlog)

    ranks: Ranks | None = None
    _exchange: tuple[WorkerInfo, str | None] | None = None

    @property
    def model(self) -> str:
        """What it calls its model, as far as it tells."""
        served = self.control.served
        return self.info.model if self.info else served.id if served else "an unknown model"

    def begin(self) -> None:
        """A request is sent to this engine; `end` follows, whatever way it leaves."""
        self.in_flight += 1
        self.num_placed += 1
        self.rank()

    def end(self) -> None:
        self.in_flight -= 1
        self.rank()

    def rank(self) -> None:
        """Take the place among the fleet's engines that this one has by what it does."""
        if self.ranks is not None:
            self.ranks.put(self.name, (self.role, self.exchange), self.in_flight, self.num_placed)

    @property
    def epoch(self) -> str:
        return "" if self.info is None else self.info.epoch

    @property
    def exchange(self) -> str | None:
        """What another engine must have in common with this one to hand KV over."""
        if self.info is None:
            return self.handoff
        if self._exchange is None or self._exchange[0] is not self.info:
            info = self.info
            self._exchange = info, None if info.connector is None else f"{info.connector}:{info.fingerprint}"
        return self._exchange[1]

    @property
    def is_usable(self) -> bool:
        """Whether it gets requests."""
        return self.down is None and not self.is_draining

    def as_candidate(self) -> Candidate:
        return Candidate(self.name, self.role, self.in_flight, self.num_placed, self.exchange)


@dataclass
class Fleet:
    """All engines. An engine that fails is down at once and is up again when it answers a look after its backoff.

    All have one model, that of the first engine that is up: what one began another may have to go on with.
    One that was neither seen nor heard for `dead_after_s` is given up: whatever waits for it ends in PeerTimeout.
    `on_up` is awaited with each engine that comes up or turns out to live a new life.
    """

    config: RouterConfig
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    on_up: Callable[[Worker], Awaitable[None]] | None = None
    workers: dict[str, Worker] = field(default_factory=dict)
    num_given_up: int = 0
    costs: EngineCosts = field(default_factory=EngineCosts)
    arrivals: Arrivals = field(default_factory=Arrivals)
    num_prefill: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    _watchers: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self, workers: list[Worker]) -> None:
        """Look at every engine once, then watch them."""
        self.adopt(workers)
        await asyncio.gather(*(self.look(worker) for worker in workers))
        for worker in workers:
            self._compare(worker)
        self._watchers = [asyncio.create_task(self._watch(worker), name=f"watch {worker.name}") for worker in workers]

    def adopt(self, workers: list[Worker]) -> None:
        """These are the engines from now on."""
        self.workers = {worker.name: worker for worker in workers}
        self.num_prefill = sum(worker.role == "prefill" for worker in workers)
        for worker in workers:
            worker.last_seen_s = self.clock()
            worker.costs = EngineCosts(self.costs)
            worker.ranks = self.ranks if self.is_large else None
            worker.rank()

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

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
        more = [name for name in also if name is not None and name not in names and name not in excluded]
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
            self.num_given_up += 1
            log.warning("engine %s is given up with %d requests", worker.name, worker.in_flight)
            worker.control.cut()

    async def _seen(self, worker: Worker, info: WorkerInfo | None) -> None:
        is_new = info is not None and worker.epoch not in ("", info.epoch)
        if is_new:
            log.warning("engine %s restarted", worker.name)
        worker.info = info
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
        """True if the engine has another model than those listed before it that are up: then it is down."""
        for other in self.workers.values():
            if other is worker:
                return False
            if other.down is None and _differ(worker, other):
                self._take_down(worker, f"it has {worker.model}, but {other.name} has {other.model}")
                return True
        return False

    def _take_down(self, worker: Worker, reason: str) -> None:
        if worker.down is None:
            worker.num_faults += 1
            worker.retry_at_s = self.clock() + backoff_s(worker.num_faults, self.config.probe_backoff_s)
            log.warning("engine %s is down: %s", worker.name, reason)
        worker.down = reason

    async def _watch(self, worker: Worker) -> None:
        num_ill = 0
        while True:
            num_ill = 0 if worker.down is None and worker.num_timeouts == 0 else num_ill + 1
            await self.sleep(backoff_s(num_ill, self.config.probe_backoff_s) or self.config.probe_interval_s)
            await self.look(worker)

    def unavailable(self) -> Unavailable:
        """Nothing can serve a request: what is down and why, and when the next look may find it up."""
        reasons = [
            f"{worker.name} ({worker.role}): {worker.down or 'draining'}"
            for worker in self.workers.values()
            if worker.down or worker.is_draining
        ]
        return Unavailable(
            "no engine can serve the request: " + ("; ".join(reasons) or "every engine is busy"),
            retry_after_s=self.config.probe_backoff_s,
        )
