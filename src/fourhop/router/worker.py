"""One engine as a router sees it: what it is, whether it is well, what it is doing for us."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fourhop.router.backlog import Backlog
from fourhop.router.costs import EngineCosts
from fourhop.router.handoff.kinds import Name
from fourhop.router.handoff.protocol import Endpoint
from fourhop.router.policy import Candidate, EngineRole
from fourhop.router.ranks import Ranks
from fourhop.tokens.server import TokenServer
from fourhop.tokens.worker import ServedModel
from fourhop.wire.ticket import KVTicket
from fourhop.wire.worker import Leases, PrefixRequest, WorkerInfo


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


class Sizes(NamedTuple):
    """Tokens in an engine's vocabulary, and in its longest sequence; None where it tells none."""

    vocab_size: int | None = None
    max_model_len: int | None = None


UNTOLD = Sizes()

NOT_SEEN = "not seen yet"


@dataclass
class Worker:
    """One engine. `down` says why it gets no requests, None when it does; a draining one is well but gets none either,
    nor does one that is leaving, which the fleet forgets when nothing refers to it (`membership`).

    `num_heard` counts the chunks that it sent, of which `num_heard_before` are known to the fleet: an engine whose
    streams go on is alive, whatever its health says. `last_seen_s` is when it was last known to be, and
    `given_up_s` what that was when it was last given up. `handoff` is how it hands KV over if it is a stock vLLM, which
    does not tell (`handoff.kinds`); None: it does not.
    """

    name: str
    role: EngineRole
    server: TokenServer
    control: Control
    handoff: Name | None = None
    endpoint: Endpoint = field(default_factory=Endpoint)
    info: WorkerInfo | None = None
    known_sizes: Sizes = UNTOLD
    down: str | None = NOT_SEEN
    is_draining: bool = False
    is_leaving: bool = False
    in_flight: int = 0
    num_placed: int = 0
    num_heard: int = 0
    num_heard_before: int = 0
    num_faults: int = 0
    num_timeouts: int = 0
    last_seen_s: float = 0.0
    given_up_s: float = -1.0
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
    def sizes(self) -> Sizes:
        """What it can take, as far as it tells."""
        if self.info is not None:
            return Sizes(self.info.vocab_size, self.info.max_model_len)
        served = self.control.served
        return Sizes(None, None if served is None else served.max_model_len)

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
        return self.down is None and not self.is_draining and not self.is_leaving

    @property
    def rests(self) -> bool:
        """Whether it is to have nothing to do, well or not."""
        return self.is_draining or self.is_leaving

    @property
    def idle_reason(self) -> str | None:
        """Why it gets no requests, None when it does."""
        return self.down or ("leaving" if self.is_leaving else "draining" if self.is_draining else None)

    def as_candidate(self) -> Candidate:
        return Candidate(self.name, self.role, self.in_flight, self.num_placed, self.exchange)


def is_same(one: Worker, other: Worker) -> bool:
    """True for one process at two URLs. A stock vLLM does not tell."""
    mine, others = one.info, other.info
    if mine is None or others is None or mine.epoch != others.epoch:
        return False
    return mine.engine_id == others.engine_id


def differ(one: Worker, other: Worker) -> bool:
    """True for other weights. Names alone may differ, as paths do; fingerprints alone too, by the size of a block.

    A stock vLLM tells its model's name and where its files are.
    """
    if one.info and other.info:
        return one.info.model != other.info.model and one.info.fingerprint != other.info.fingerprint
    mine, others = one.control.served, other.control.served
    return mine is not None and others is not None and mine.id != others.id and mine.root != others.root
