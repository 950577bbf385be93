"""Engines that take their time, in virtual time: the real scheduler and block pool, steps that cost what a line says.

There is no model and no KV: every token is 1. A prompt that is computed keeps the streams of its engine waiting, a
hand-over waits for prefill and then for the wire, and engines on one core slow each other down, as on a real machine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from fakes.virtual_time import now
from fourhop.engine.blocks import BlockPool
from fourhop.engine.scheduler import Scheduler
from fourhop.engine.sequence import Phase, Sequence
from fourhop.engine.step import Limits, Load, Work
from fourhop.router.app import Router
from fourhop.router.config import GoodputConfig, RouterConfig
from fourhop.router.dial import Dial
from fourhop.wire.generate import ChunkChoice, GenerateChunk, GenerateRequest, PromptTokensDetails, Usage
from fourhop.wire.moments import Moment, Timeline
from fourhop.wire.ticket import FirstToken, HoldRequest, KVTicket, hash_tokens, parse_transfer_params
from fourhop.wire.worker import Leases, PrefixRequest, Role, WorkerInfo

TOKEN = 1
BLOCK_SIZE = 16
FOR_EVER_S = 1e9


@dataclass(frozen=True)
class Speed:
    """Seconds of a step (fixed, for each prompt token, for each stream), and of a token's KV to move.

    A step takes `slowdown` times as long while another engine works: they may be threads of one core.
    """

    step_s: float = 0.02
    prompt_token_s: float = 0.002
    stream_s: float = 0.002
    transfer_token_s: float = 0.00002
    slowdown: float = 1.0


@dataclass(eq=False)
class _Task:
    """A sequence and who waits for it."""

    sequence: Sequence
    timeline: Timeline
    updates: asyncio.Queue[GenerateChunk]
    early: bool = False


@dataclass(eq=False)
class TimedEngine:
    """A TokenServer and its control endpoints. `peers` are the engines that tickets lead to."""

    name: str
    role: Role
    speed: Speed = field(default_factory=Speed)
    max_num_batched_tokens: int = 2048
    max_handover_tokens: int = 512
    prefix_caching: bool = False
    tells_moments: bool = True
    peers: dict[str, TimedEngine] = field(default_factory=dict)
    num_steps: int = 0
    busy_s: float = 0.0
    is_working: bool = False
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _tasks: dict[int, _Task] = field(default_factory=dict)
    _tickets: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    _inbox: list[Callable[[], None]] = field(default_factory=list)
    _loads: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        limits = Limits(
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_handover_tokens=self.max_handover_tokens,
            max_num_seqs=64,
            max_model_len=100_000,
            prefix_caching=self.prefix_caching,
        )
        self.scheduler = Scheduler(BlockPool(20_000), limits)
        self._wake = asyncio.Event()
        self._disturbed = asyncio.Event()

    @property
    def engine_id(self) -> str:
        return self.name

    @property
    def served(self) -> None:
        return None

    @property
    def is_idle(self) -> bool:
        return not self._tasks and self.scheduler.pool.num_free == self.scheduler.pool.num_blocks

    async def run(self) -> None:
        """Steps, for ever."""
        while True:
            self._take_requests()
            step = self.scheduler.schedule()
            for load in step.loads:
                task = asyncio.create_task(self._load(load))
                self._loads.add(task)
                task.add_done_callback(self._loads.discard)
            self._begin(step.work)
            if step.work:
                await self._compute(self._seconds(step.work))
                self._advance(step.work)
            elif not (step.loads or step.preempted):
                self._works(False)
                await self._wake.wait()
                self._wake.clear()

    def _works(self, is_working: bool) -> None:
        if is_working is not self.is_working:
            self.is_working = is_working
            for other in self.peers.values():
                other._disturbed.set()

    async def _compute(self, left_s: float) -> None:
        """So many seconds of work, which take longer while others work."""
        self._works(True)
        while left_s > 1e-9:
            others = any(one.is_working for one in self.peers.values() if one is not self)
            factor, began_s = self.speed.slowdown if others else 1.0, now()
            if factor == self.speed.slowdown == 1.0:
                await asyncio.sleep(left_s)
                return
            self._disturbed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s * factor):
                    await self._disturbed.wait()
            left_s -= (now() - began_s) / factor

    def _take_requests(self) -> None:
        while self._inbox:
            self._inbox.pop(0)()

    def _ask(self, question: Callable[[], None]) -> None:
        self._inbox.append(question)
        self._wake.set()

    def _seconds(self, work: list[Work]) -> float:
        num_decodes = sum(item.num_tokens == 1 for item in work)
        num_prompt = sum(item.num_tokens for item in work) - num_decodes
        self.num_steps += 1
        seconds = self.speed.step_s + num_prompt * self.speed.prompt_token_s + num_decodes * self.speed.stream_s
        self.busy_s += seconds
        return seconds

    def _begin(self, work: list[Work]) -> None:
        for task in [self._tasks[item.sequence.seq_id] for item in work if item.sequence.seq_id in self._tasks]:
            task.timeline.mark(Moment.PREFILL_STARTED, now())
            if task.early:
                task.early = False
                task.updates.put_nowait(_chunk(task, ticket=self._ticket(task.sequence)))

    def _advance(self, work: list[Work]) -> None:
        running = [item for item in work if item.sequence.phase is Phase.RUNNING]
        for sequence, finish in self.scheduler.advance(running, {item.sequence.seq_id: TOKEN for item in running}):
            task = self._tasks.get(sequence.seq_id)
            if task is None:
                continue
            task.timeline.mark(Moment.PREFILL_DONE, now())
            ticket = None
            if finish is not None:
                task.timeline.mark(Moment.LAST_TOKEN, now())
                ticket = self._ticket(sequence) if sequence.phase is Phase.HELD else None
            self._tell(task, finish is not None, ticket)

    def _tell(self, task: _Task, is_last: bool, ticket: dict[str, Any] | None = None) -> None:
        moments = task.timeline.since_received() if self.tells_moments else None
        choice = ChunkChoice(token_ids=[TOKEN], finish_reason="length" if is_last else None)
        task.updates.put_nowait(_chunk(task, choice, ticket, moments))
        if is_last:
            sequence = task.sequence
            self._tasks.pop(sequence.seq_id, None)
            details = PromptTokensDetails(sequence.num_cached or 0)
            usage = Usage(sequence.num_prompt, sequence.num_output, sequence.num_tokens, details)
            task.updates.put_nowait(GenerateChunk(request_id=sequence.request_id, choices=[], usage=usage))
            if sequence.held_as and sequence.held_as in self._tickets and not self._tickets[sequence.held_as].done():
                self._tickets[sequence.held_as].set_result(None)

    def _ticket(self, sequence: Sequence) -> dict[str, Any]:
        if not sequence.held_as:
            sequence.held_as = f"{self.name}-{sequence.seq_id}"
            self._tickets[sequence.held_as] = asyncio.get_running_loop().create_future()
        ticket = KVTicket(
            ticket_id=sequence.held_as,
            connector="timed",
            epoch="1",
            fingerprint="timed",
            token_hash=hash_tokens(sequence.prompt_token_ids),
            expires_at_s=FOR_EVER_S,
            engine_id=self.name,
            request_id=sequence.request_id,
            host="127.0.0.1",
            port=1,
            num_tokens=sequence.num_prompt,
            block_ids=[],
            first_token=FirstToken(TOKEN),
        )
        built: dict[str, Any] = msgspec.to_builtins(ticket)
        return built

    async def _load(self, load: Load) -> None:
        """The KV is here a little after the source has computed it."""
        sequence = load.sequence
        assert sequence.ticket is not None
        source, name = self.peers[sequence.ticket.engine_id], sequence.ticket.ticket_id
        task = self._tasks.get(sequence.seq_id)
        if task is not None:
            task.timeline.mark(Moment.KV_REQUESTED, now())
        with suppress(asyncio.CancelledError):
            await source._tickets[name]
        await asyncio.sleep(sequence.num_prompt * self.speed.transfer_token_s)
        await source.abort([name])
        self._ask(lambda: self._loaded(sequence, task))

    def _loaded(self, sequence: Sequence, task: _Task | None) -> None:
        if task is not None and sequence.phase is Phase.LOADING:
            task.timeline.mark(Moment.KV_READY, now())
            if not sequence.output_token_ids:
                sequence.append(TOKEN)
                self._tell(task, False)
        self.scheduler.loaded(sequence)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        transfer = parse_transfer_params(request.kv_transfer_params)
        sequence = Sequence(
            seq_id=next(self._ids),
            request_id=request.request_id,
            prompt_token_ids=request.token_ids,
            params=request.sampling_params,
            seed=0,
            max_tokens=request.sampling_params.max_tokens or 16,
            eos_token_ids=frozenset(),
            hold=isinstance(transfer, HoldRequest),
            ticket=transfer if isinstance(transfer, KVTicket) else None,
            output_token_ids=list(request.output_token_ids),
        )
        is_early = isinstance(transfer, HoldRequest) and transfer.early_ticket
        task = _Task(sequence, Timeline(now()), asyncio.Queue(), is_early)
        self._tasks[sequence.seq_id] = task
        self._ask(lambda: self.scheduler.add(sequence))
        try:
            while True:
                chunk = await task.updates.get()
                yield chunk
                if chunk.usage is not None:
                    return
        finally:
            if self._tasks.pop(sequence.seq_id, None) is not None:
                self._ask(lambda: self._end(sequence))

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.abort(sequence)
        pulled = self._tickets.pop(sequence.held_as, None)
        if pulled is not None and not pulled.done():
            pulled.cancel()

    async def abort(self, request_ids: list[str]) -> None:
        wanted = set(request_ids)
        held = [one for one in self.scheduler.held.values() if {one.held_as, one.request_id} & wanted]
        for sequence in held:
            self._ask(lambda sequence=sequence: self._end(sequence))  # type: ignore[misc]

    async def check(self) -> WorkerInfo | None:
        return WorkerInfo(
            engine_id=self.name,
            epoch="1",
            model="timed",
            role=self.role,
            fingerprint="timed",
            connector="timed",
            max_model_len=100_000,
            vocab_size=1000,
            block_size=BLOCK_SIZE,
            num_blocks=1,
            num_free_blocks=1,
            num_held_blocks=0,
            num_running=0,
            num_waiting=0,
        )

    async def refuse(self, transfer: dict[str, Any]) -> None:
        raise AssertionError("tickets are given back by name")

    async def leases(self) -> Leases:
        return Leases(engine_id=self.name, epoch="1", leases=[])

    async def renew(self, ticket_ids: list[str]) -> list[KVTicket]:
        return []

    async def hold_prefix(self, request: PrefixRequest) -> dict[str, Any] | None:
        return None

    async def migrate(self, request_ids: list[str]) -> int:
        return 0

    def cut(self) -> None:
        raise AssertionError("no engine here falls silent")


def _chunk(
    task: _Task,
    choice: ChunkChoice | None = None,
    ticket: dict[str, Any] | None = None,
    moments: dict[str, float] | None = None,
) -> GenerateChunk:
    choices = [] if choice is None else [choice]
    return GenerateChunk(
        request_id=task.sequence.request_id, choices=choices, kv_transfer_params=ticket, moments=moments
    )


@dataclass(frozen=True)
class TimedFleet:
    router: Router
    engines: dict[str, TimedEngine]
    registry: CollectorRegistry

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def timed_fleet(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    speed: Speed | None = None,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[TimedFleet]:
    """Engines p0, …, d0, … and a router that was started, in the virtual time of the running loop."""
    names: list[tuple[str, Role]] = [(f"http://p{index}", "prefill") for index in range(num_prefill)]
    names += [(f"http://d{index}", "decode") for index in range(num_decode)]
    engines = {name: TimedEngine(name, role, speed or Speed(), **(engine or {})) for name, role in names}
    for one in engines.values():
        one.peers = engines

    @asynccontextmanager
    async def dial(config: RouterConfig) -> AsyncIterator[Dial]:
        yield lambda url, role: (engines[url], engines[url])

    sides = [tuple(name for name, role in names if role == side) for side in ("prefill", "decode")]
    config = RouterConfig(sides[0], sides[1], probe_interval_s=1e6, idle_timeout_s=1e6)
    registry = CollectorRegistry()
    loop = asyncio.get_running_loop()
    router = Router(
        config,
        GoodputConfig(**settings),
        registry=registry,
        dial=dial,
        clock=loop.time,
        wall_clock=loop.time,
        draw_seed=lambda: 4,
        router_id="t",
    )
    runs = [asyncio.create_task(one.run()) for one in engines.values()]
    try:
        async with router.running():
            yield TimedFleet(router, engines, registry)
    finally:
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
