"""A router over stub engines, without a network: everything a routing test needs in one hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from contracts.token_server import until
from fakes.stub_engine import StubEngine
from fourhop.router.app import Router
from fourhop.router.config import GoodputConfig, RouterConfig
from fourhop.router.dial import Dial
from fourhop.router.policy import EngineRole
from fourhop.service.tracing import Tracer


@dataclass
class Clock:
    """Time that moves when a test says so."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Bench:
    """The router under test and the engines behind it."""

    router: Router
    prefill: Sequence[StubEngine]
    decode: Sequence[StubEngine]
    clock: Clock
    registry: CollectorRegistry
    known: dict[str, StubEngine]

    @property
    def engines(self) -> list[StubEngine]:
        """All that were ever started."""
        return list(self.known.values())

    def start(self, name: str, role: EngineRole) -> StubEngine:
        """An engine that is there, and that the router was not told of."""
        self.known[name] = engine = StubEngine(name, role=role, peers=self.known)
        return engine

    def is_idle(self) -> bool:
        """Nothing is in flight, owed, held or open anywhere."""
        workers = self.router.fleet.workers.values()
        return (
            all(engine.is_idle() for engine in self.engines)
            and all(worker.in_flight == 0 for worker in workers)
            and not self.router.ledger.owed
        )

    async def settle(self) -> None:
        await until(self.is_idle)

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    async def look(self) -> None:
        """Look at every engine, as the watchers do in their time."""
        for worker in self.router.fleet.workers.values():
            await self.router.fleet.look(worker)


@asynccontextmanager
async def bench(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    goodput: GoodputConfig | None = None,
    kv_recompute_threshold: int = 16,
    tracer_of: Callable[[Clock], Tracer] | None = None,
    **settings: Any,
) -> AsyncIterator[Bench]:
    """Engines p0, p1, … and d0, d1, …, and wherever else the router looks for one, and a router that was started.

    Its watchers never wake up by themselves.
    """
    prefill = [StubEngine(f"http://p{index}", role="prefill") for index in range(num_prefill)]
    decode = [StubEngine(f"http://d{index}", role="decode") for index in range(num_decode)]
    engines = {engine.name: engine for engine in (*prefill, *decode)}
    for engine in engines.values():
        engine.peers = engines

    @asynccontextmanager
    async def dial(config: RouterConfig) -> AsyncIterator[Dial]:
        def connect(url: str, role: EngineRole) -> tuple[StubEngine, StubEngine]:
            engine = engines.setdefault(url, StubEngine(url, role=role, peers=engines))
            return engine, engine

        yield connect

    async def never(seconds: float) -> None:
        await asyncio.Event().wait()

    urls = [tuple(engine.name for engine in side) for side in (prefill, decode)]
    clock, registry = Clock(), CollectorRegistry()
    router = Router(
        RouterConfig(urls[0], urls[1], kv_recompute_threshold=kv_recompute_threshold, **settings),
        goodput or GoodputConfig(),
        registry=registry,
        dial=dial,
        clock=clock,
        wall_clock=clock,
        draw_seed=lambda: 4,
        router_id="ours",
        tracer=None if tracer_of is None else tracer_of(clock),
    )
    router.fleet.sleep = never
    async with router.running():
        yield Bench(router, prefill, decode, clock, registry, engines)
