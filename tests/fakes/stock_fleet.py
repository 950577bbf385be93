"""A router over stock vLLMs that have no model, each behind a socket of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from contracts.token_server import until
from fakes.fleet import Clock
from fakes.serving import serving
from fakes.stock_vllm import StockVLLM
from fourhop.router.app import Router
from fourhop.router.config import RouterConfig
from fourhop.router.handoff.protocol import Endpoint


@dataclass(frozen=True)
class StockFleet:
    """Stock engines behind sockets, and a router that was told how they hand over."""

    router: Router
    prefill: list[StockVLLM]
    decode: list[StockVLLM]
    clock: Clock
    registry: CollectorRegistry

    def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds
        for engine in (*self.prefill, *self.decode):
            engine.now_s += seconds

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"fourhop_router_{name}", labels) or 0.0

    async def settle(self) -> None:
        engines = (*self.prefill, *self.decode)
        workers = self.router.fleet.workers.values()
        await until(lambda: all(one.is_idle() for one in engines) and all(one.in_flight == 0 for one in workers))

    async def end_leases(self) -> None:
        """Every lease is over, and the router has seen that."""
        self.pass_time(130.0)
        self.router.ledger.expire(self.clock())
        assert not self.router.ledger.owed


@asynccontextmanager
async def stock_fleet(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    kind: Callable[[str], StockVLLM] = StockVLLM,
    endpoints: Mapping[str, Endpoint] | None = None,
    **settings: Any,
) -> AsyncIterator[StockFleet]:
    """Engines p0, p1, ... and d0, d1, ... of one kind. The router's watchers never wake up by themselves.

    `endpoints` are where the connectors of some of them listen, by the names of the engines.
    """
    prefill = [kind(f"p{index}") for index in range(num_prefill)]
    decode = [kind(f"d{index}") for index in range(num_decode)]
    peers = {engine.engine_id: engine for engine in (*prefill, *decode)}
    for engine in peers.values():
        engine.peers = peers
    clock, registry = Clock(), CollectorRegistry()

    async def never(seconds: float) -> None:
        await asyncio.Event().wait()

    async with AsyncExitStack() as stack:
        urls: list[tuple[str, ...]] = []
        where, known = dict[str, Endpoint](), endpoints or {}
        for side in (prefill, decode):
            served = {await stack.enter_async_context(serving(engine.app())): engine for engine in side}
            urls.append(tuple(sorted(served)))
            where |= {url: known[one.engine_id] for url, one in served.items() if one.engine_id in known}
            side[:] = [served[url] for url in sorted(served)]  # the order in which the router prefers them
        router = Router(
            RouterConfig(urls[0], urls[1], **({"handoff": "nixl", "handoff_endpoints": where} | settings)),
            registry=registry,
            wall_clock=clock,
            draw_seed=lambda: 4,
            router_id="ours",
        )
        router.fleet.sleep = never
        await stack.enter_async_context(router.running())
        yield StockFleet(router, prefill, decode, clock, registry)
