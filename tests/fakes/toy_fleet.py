"""A router over real engines with the toy model, each behind a socket, that can be killed and started anew."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import uvicorn
from prometheus_client import CollectorRegistry

from fakes.engines import toy_engine
from fakes.serving import stop_listening
from fourhop.engine.app import create
from fourhop.engine.config import EngineConfig
from fourhop.engine.sampled import Computed
from fourhop.engine.server import Engine
from fourhop.engine.step import Work
from fourhop.engine.toy import ToyRunner
from fourhop.kv.config import ConnectorOptions, KVEventsConfig, KVTransferConfig
from fourhop.router.app import Router
from fourhop.router.config import RouterConfig
from fourhop.service import ServerConfig

CONFIG = EngineConfig(block_size=4, max_num_batched_tokens=8)
TRANSFER = KVTransferConfig(
    kv_connector="shm", kv_connector_extra_config=ConnectorOptions(kv_lease_duration=3.0, pull_timeout_s=3.0)
)


class SlowRunner(ToyRunner):
    """A model whose steps take time, so that something can happen between two of them."""

    step_s = 0.008

    def run(self, work: list[Work]) -> Computed:
        time.sleep(self.step_s)
        return super().run(work)


@dataclass(eq=False)
class ToyServer:
    """One engine and its port. `kill` is a crash: connections break at once, and a new life knows nothing."""

    config: EngineConfig = CONFIG
    transfer: KVTransferConfig = TRANSFER
    events: KVEventsConfig | None = None
    eos_token_ids: frozenset[int] = frozenset()
    runner: type[ToyRunner] = ToyRunner
    port: int = 0
    _life: AsyncExitStack | None = None
    _server: uvicorn.Server | None = None
    _engine: Engine | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    async def start(self) -> None:
        self._life = AsyncExitStack()
        self._engine = await self._life.enter_async_context(
            toy_engine(
                num_blocks=128,
                config=self.config,
                transfer=self.transfer,
                events=self.events,
                runner=self.runner,
                eos_token_ids=self.eos_token_ids,
            )
        )
        listener = self._life.enter_context(socket.create_server(("127.0.0.1", self.port)))
        self.port = listener.getsockname()[1]
        app = create(self._engine, ServerConfig())
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup(sockets=[listener])

    async def kill(self) -> None:
        assert self._server is not None and self._life is not None
        await stop_listening(self._server)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        for task in list(self._server.server_state.tasks):
            task.cancel()
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)
        await self._life.aclose()
        self._server, self._life, self._engine = None, None, None

    async def close(self) -> None:
        if self._life is not None:
            await self.kill()

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is held, and every block is free."""
        if self._engine is None:
            return True
        info = self._engine.info()
        return info.num_free_blocks == info.num_blocks and info.num_running == info.num_waiting == 0


@dataclass(frozen=True)
class ToyFleet:
    router: Router
    prefill: list[ToyServer]
    decode: list[ToyServer]
    registry: CollectorRegistry
    servers: dict[str, ToyServer] = field(default_factory=dict)

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def is_idle(self) -> bool:
        workers = self.router.fleet.workers.values()
        return (
            all(server.is_idle for server in self.servers.values())
            and all(worker.in_flight == 0 for worker in workers)
            and not self.router.ledger.owed
        )

    async def settle(self, within_s: float = 10.0) -> None:
        async with asyncio.timeout(within_s):
            while not self.is_idle():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@asynccontextmanager
async def toy_fleet(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    config: EngineConfig = CONFIG,
    transfer: KVTransferConfig = TRANSFER,
    events: KVEventsConfig | None = None,
    eos_token_ids: frozenset[int] = frozenset(),
    runner: type[ToyRunner] = ToyRunner,
    kv_recompute_threshold: int = 4,
) -> AsyncIterator[ToyFleet]:
    """A router, started, whose engines are all up."""
    sides = [
        [ToyServer(config, transfer, events, eos_token_ids, runner) for _ in range(number)]
        for number in (num_prefill, num_decode)
    ]
    servers = [*sides[0], *sides[1]]
    try:
        for server in servers:
            await server.start()
        urls = [tuple(server.url for server in side) for side in sides]
        registry = CollectorRegistry()
        router = Router(
            RouterConfig(
                urls[0],
                urls[1],
                probe_interval_s=0.1,
                probe_backoff_s=0.1,
                dead_after_s=0.5,
                kv_recompute_threshold=kv_recompute_threshold,
            ),
            registry=registry,
        )
        async with router.running():
            yield ToyFleet(router, sides[0], sides[1], registry, {server.url: server for server in servers})
    finally:
        for server in servers:
            await server.close()
        gc.collect()
