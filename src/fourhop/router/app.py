"""`Router`: a TokenServer that splits each request over two engines, and the app of its process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager

import msgspec
from prometheus_client import CollectorRegistry

from fourhop.router.admission import Queue
from fourhop.router.caches import Caches
from fourhop.router.config import GoodputConfig, RouterConfig
from fourhop.router.conversations import Conversations
from fourhop.router.degraded import Degraded
from fourhop.router.dial import Dial, dial_http
from fourhop.router.discovery.follow import Discovery, DiscoveryCollector
from fourhop.router.discovery.registrations import Registrations
from fourhop.router.discovery.sources import sources_of
from fourhop.router.fleet import Fleet
from fourhop.router.gate import Gate
from fourhop.router.handover import Handover
from fourhop.router.history import History
from fourhop.router.housekeeping import Housekeeping
from fourhop.router.keys import ACCOUNT, Account, with_salt
from fourhop.router.leases import LeaseKeeper
from fourhop.router.ledger import Ledger
from fourhop.router.membership import Membership
from fourhop.router.metrics import RouterMetrics, StateCollector
from fourhop.router.migration import Migration
from fourhop.router.placement import Placer
from fourhop.router.policy import EngineRole
from fourhop.router.progress import Progress
from fourhop.router.records import Record
from fourhop.router.release import Releaser
from fourhop.router.run import Run
from fourhop.router.split import Split
from fourhop.router.worker import Worker
from fourhop.service.logs import event
from fourhop.service.tracing import Tracer
from fourhop.tokens.choices import merge_choices, split_choices, with_seed
from fourhop.tokens.limits import Limits, check_request, check_supported, resolve_max_tokens
from fourhop.wire.errors import ClientError, FourhopError
from fourhop.wire.generate import GenerateChunk, GenerateRequest
from fourhop.wire.moments import Moment, Timeline
from fourhop.wire.prompt import Prompt

log = logging.getLogger(__name__)
request_log = logging.getLogger("fourhop.request")

DEFAULT_GOODPUT = GoodputConfig()


class Router:
    """A TokenServer over many engines. Use it inside `running`, or between `start` and `close`."""

    def __init__(
        self,
        config: RouterConfig,
        goodput: GoodputConfig = DEFAULT_GOODPUT,
        *,
        registry: CollectorRegistry,
        dial: Callable[[RouterConfig], AbstractAsyncContextManager[Dial]] = dial_http,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
        router_id: str | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        prefix = f"{router_id or secrets.token_hex(6)}-"
        numbers = itertools.count()

        def new_id() -> str:
            return f"{prefix}{next(numbers)}"

        self.config = config
        self.ledger = Ledger()
        self.fleet = Fleet(config, clock)
        self.releaser = Releaser(self.fleet, self.ledger)
        self.leases = LeaseKeeper(self.fleet, self.ledger, self.releaser, prefix=prefix, wall_clock=wall_clock)
        self.fleet.on_up = self._meet
        self.metrics = RouterMetrics(registry, clock)
        self.caches = Caches(config, self.metrics.fallbacks)
        self.degraded = Degraded(self.fleet, self.caches, self.ledger, clock)
        self.history = History(config.max_history)
        self.queue = Queue(goodput.max_queued)
        registry.register(StateCollector(self.fleet, self.ledger, self.leases, self.queue, self.degraded, wall_clock))
        self.migration = Migration(self.fleet, self._runs, self.metrics.fallbacks)
        registrations = Registrations(clock) if config.engines_join else None
        sources = [*sources_of(config), *([] if registrations is None else [registrations])]
        discovery = Discovery(config.listed, sources, self._sleep)
        registry.register(DiscoveryCollector(discovery))
        self.membership = Membership(self.fleet, self.ledger, discovery, self.migration, registrations, wall_clock)
        self.membership.on_gone = self._forget
        handover = Handover(self.fleet, self.ledger, self.releaser, self.metrics, wall_clock)
        conversations = Conversations(
            config, self.fleet, self.ledger, self.releaser, self.metrics, wall_clock, new_id, self.caches
        )
        progress = Progress(self.fleet.costs, self.fleet.arrivals, conversations, clock)
        placer = Placer(goodput, self.fleet, progress, clock)
        self._gate = Gate(goodput, self.fleet, placer, self.queue, self.metrics, clock, config.first_chunk_timeout_s)
        progress.changed = self._gate.changed
        progress.watches = goodput.placement == "auto"
        self._split = Split(
            self.fleet, handover, conversations, placer, progress, self.metrics, config.max_retries, clock, new_id
        )
        self.conversations, self.progress, self.placer = conversations, progress, placer
        self.discovery = discovery
        self.housekeeping = Housekeeping(
            {
                "expire": lambda: self.ledger.expire(wall_clock()),
                "leaks": self.releaser.retry_leaks,
                "leases": self.leases.renew,
                "members": self.membership.settle,
                "move": self.migration.go_on,
                "gate": self._gate.changed,
                "degraded": self.degraded.look,
            },
            self._sleep,
            self.metrics.housekeeping,
        )
        self._dial = dial
        self._clock = clock
        self._draw_seed = draw_seed
        self._tracer = tracer
        self._records: set[Record] = set()
        self._limited_at = -1
        self._resources = AsyncExitStack()

    async def start(self) -> None:
        """Connect to the engines and look at each once. An engine that is not there is waited for, not an error."""
        dial = await self._resources.enter_async_context(self._dial(self.config))

        def hire(url: str, role: EngineRole) -> Worker:
            return Worker(url, role, *dial(url, role), self.config.handoff, self.config.endpoint(url))

        await self.membership.start(hire)
        self.housekeeping.start()

    async def close(self) -> None:
        """Stop looking at engines, finish the releases, close the connections."""
        await self.housekeeping.close()
        await self.discovery.close()
        await self.fleet.close()
        await self.caches.close()
        await self.releaser.close()
        await self._resources.aclose()

    async def _sleep(self, seconds: float) -> None:
        await self.fleet.sleep(seconds)

    async def _meet(self, worker: Worker) -> None:
        """An engine came up."""
        self.caches.follow(worker)
        await self.leases.reconcile(worker)

    def _forget(self, engine: str) -> None:
        """An engine is gone."""
        self.caches.leave(engine)
        self.conversations.index.forget_engine(engine)
        self._gate.changed()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            await self.start()
            yield
        finally:
            await self.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """See `TokenServer`. Raises ClientError, Unavailable when no engine is alive, or an engine's own error."""
        hop = None if self._tracer is None else self._tracer.begin(request.traceparent)
        if hop is not None:
            request = msgspec.structs.replace(request, traceparent=hop.traceparent)
        account = ACCOUNT.get()
        record = Record(request, Timeline(self._clock()), hop=hop, owner=account)
        self._records.add(record)
        try:
            record.runs = self._runs_of(with_salt(request, account), record.timeline.at_s[Moment.RECEIVED])
            looks_at_prompt = request.sampling_params.prompt_logprobs is not None
            async with self._gate.entered(record.runs[0], len(record.runs)) as placed:
                self._let_in(record, placed)
                streams = [self._split.generate(run) for run in record.runs]
                async with aclosing(merge_choices(streams, prompt_first=looks_at_prompt)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            record.outcome = "finished"
        except FourhopError as error:
            record.fail(error)
            raise
        finally:
            self._records.discard(record)
            if account is not None:
                account.spend(record.num_tokens)
            self._report(record, account)

    def _let_in(self, record: Record, placed: Callable[[], None]) -> None:
        now_s = self._clock()
        for run in record.runs:
            run.timeline.mark(Moment.ADMITTED, now_s)
            run.on_placed = placed

    def _runs_of(self, request: GenerateRequest, received_s: float) -> list[Run]:
        """The runs of a request, one for each choice, checked, and resolved so that every leg sees the same.

        All have the prompt itself in common, which is packed and encoded once.
        """
        if request.kv_transfer_params is not None:
            raise ClientError("kv_transfer_params: transfers are the router's own affair", param="kv_transfer_params")
        limits = self._limits()
        check_request(self._without_wishes(request), limits)
        if limits.max_model_len is not None:
            request = resolve_max_tokens(request, limits.max_model_len)
        request = msgspec.structs.replace(request, token_ids=Prompt(request.token_ids))
        return [Run(choice, Timeline(received_s)) for choice in split_choices(with_seed(request, self._draw_seed))]

    def _without_wishes(self, request: GenerateRequest) -> GenerateRequest:
        """The request without what is the router's own affair and no engine's."""
        if request.priority == 0 and request.targets is None:
            return request
        check_supported(request, routes=True)
        return msgspec.structs.replace(request, priority=0, targets=None)

    def _limits(self) -> Limits:
        """What every engine of the fleet can take, as far as they have said."""
        if self._limited_at != self.fleet.num_changes:
            self._limited_at = self.fleet.num_changes
            sizes = [worker.sizes for worker in self.fleet.workers.values()]
            self._known_limits = Limits(
                vocab_size=min((one.vocab_size for one in sizes if one.vocab_size is not None), default=None),
                max_model_len=min((one.max_model_len for one in sizes if one.max_model_len is not None), default=None),
                max_num_choices=self.config.max_num_choices,
                max_logprobs=self.config.max_logprobs,
            )
        return self._known_limits

    async def abort(self, request_ids: list[str]) -> None:
        """End requests by the client's id: their engines are told, and end them with the finish reason "abort".

        A key ends its own only. Every engine is told, whatever another one answers; then its error is raised.
        """
        wanted, asker = set(request_ids), ACCOUNT.get()
        mine = [record for record in self._records if asker in (None, record.owner)]
        runs = [run for record in mine if record.request.request_id in wanted for run in record.runs]
        legs = [leg for run in runs for leg in run.legs]
        told = [leg.worker.control.abort([leg.request.request_id]) for leg in legs]
        failures = [one for one in await asyncio.gather(*told, return_exceptions=True) if one is not None]
        if failures:
            raise failures[0]

    def _runs(self) -> list[tuple[str, Run]]:
        """Every run that is open, with the client's id of its request."""
        return [(record.request.request_id, run) for record in self._records for run in record.runs]

    def health(self) -> str | None:
        """Why no request can be served, or None."""
        return (
            None
            if any(worker.is_usable for worker in self.fleet.workers.values())
            else self.fleet.unavailable().message
        )

    def _report(self, record: Record, account: Account | None) -> None:
        """Count a request that ended, remember it, and leave its line in the log."""
        self.metrics.requests[record.outcome].inc()
        ended_s = self._clock() - record.timeline.at_s[Moment.RECEIVED]
        if self.config.max_history:
            self.history.keep(record.ended(ended_s), account)
        if record.hop is not None:
            record.trace(record.hop)
        if request_log.isEnabledFor(logging.INFO):
            request_log.info(event("request", **record.line(ended_s)))
