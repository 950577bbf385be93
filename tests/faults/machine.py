"""A machine of a storm: a whole engine behind its own address, that can crash, stop and start anew there."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from fakes.engines import VOCAB_SIZE
from faults.connector import Place, SimConnector
from faults.network import MACHINE
from faults.weather import Storm
from fourhop.engine.app import create
from fourhop.engine.assembly import Model, Surroundings, run_engine
from fourhop.engine.config import EngineConfig
from fourhop.engine.loop import EngineLoop
from fourhop.engine.server import Engine
from fourhop.engine.toy import ToyRunner, toy_layout
from fourhop.engine.transfers import Transfers
from fourhop.kv.config import KVTransferConfig
from fourhop.kv.connector import Connector, Notify
from fourhop.kv.layout import KVPool
from fourhop.router.policy import EngineRole
from fourhop.service import ServerConfig
from fourhop.wire.errors import EngineError

HTTP_PORT = 8000
BOOT_S = 0.2


@dataclass(frozen=True)
class Build:
    """What a machine is made of, the same after every start."""

    name: str
    num_blocks: int
    window: int
    config: EngineConfig
    transfer: KVTransferConfig
    eos_token_ids: frozenset[int]


class SteppedLoop(EngineLoop):
    """An engine's loop as a task. `pace` says how long a step takes."""

    pace: Callable[[], float]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, transfers: Transfers | None) -> None:
        self.transfers = transfers
        self._task = asyncio.get_running_loop().create_task(self._turn())

    def stop(self) -> None:
        self.kill()
        self._fail_all(EngineError("the engine is shutting down"))

    def kill(self) -> None:
        """The process is gone, and with it whoever could say so."""
        assert self._task is not None
        self._task.cancel()

    def notify(self) -> None:
        self._news.set()

    async def _turn(self) -> None:
        while True:
            self._news.clear()
            if self.step():
                await asyncio.sleep(self.pace())
                continue
            idle_s = self.idle_timeout_s()
            try:
                # Time goes on while a loop turns, if only by a little.
                await asyncio.wait_for(self._news.wait(), None if idle_s is None else idle_s + 1e-6)
            except TimeoutError:
                continue
            await asyncio.sleep(self.pace())


class Machine:
    """Off until `boot`. `skew_s` is how far its wall clock is from the true time."""

    def __init__(self, build: Build, place: Place, storm: Storm) -> None:
        self.name = build.name
        self.build = build
        self.skew_s = 0.0
        self.engine: Engine | None = None
        self.connector: SimConnector | None = None
        self.server = ServerState()
        self._num_transfers = 0
        self._place = place
        self._storm = storm
        self._stack = AsyncExitStack()

    @property
    def role(self) -> EngineRole:
        """What it is to a router."""
        return "prefill" if self.name[0] == "p" else "decode"

    @property
    def url(self) -> str:
        return f"http://{self.name}:{HTTP_PORT}"

    @property
    def num_transfers(self) -> int:
        """Pulls that succeeded, in all lives of the machine."""
        return self._num_transfers + (0 if self.engine is None else self.engine.loop.jobs.counters.transfers)

    def boot(self) -> asyncio.Task[None]:
        """Start an engine with a new epoch at the same addresses."""
        context = contextvars.copy_context()
        context.run(MACHINE.set, self.name)
        return asyncio.get_running_loop().create_task(self._boot(), context=context)

    async def crash(self, *, silently: bool) -> None:
        """The process is killed; `silently`: the others' packets go unanswered, as when a machine loses its power."""
        if self.engine is None or self.connector is None:
            return
        self._storm.note(f"{self.name} crashes{' silently' if silently else ''}")
        assert isinstance(self.engine.loop, SteppedLoop)
        self.engine.loop.kill()
        self._place.network.vanish(self.name, silently=silently)
        await self._leave()

    async def stop(self) -> None:
        """The process is told to end, and does."""
        if self.engine is None:
            return
        self._storm.note(f"{self.name} stops")
        self._place.network.silence(self.name)
        await self._end_requests()
        await self._leave()
        self._place.network.vanish(self.name, silently=False)

    async def _leave(self) -> None:
        if self.engine is not None:
            self._num_transfers += self.engine.loop.jobs.counters.transfers
        self.engine = self.connector = None
        stack, self._stack = self._stack, AsyncExitStack()
        await self._end_requests()
        await stack.aclose()

    async def _end_requests(self) -> None:
        tasks = list(self.server.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _boot(self) -> None:
        build, loop = self.build, asyncio.get_running_loop()
        pool = KVPool(toy_layout(build.num_blocks, build.config.block_size))
        self._stack.callback(pool.close)
        started_s = loop.time()
        surroundings = Surroundings(
            clock=lambda: loop.time() - started_s, wall_clock=lambda: self._storm.wall_s(self.skew_s), loop=SteppedLoop
        )
        self.engine = await self._stack.enter_async_context(
            run_engine(
                build.config,
                Model("toy", "toy", VOCAB_SIZE, build.window, build.eos_token_ids),
                ToyRunner(pool),
                pool,
                transfer=build.transfer,
                connect=self._connect,
                surroundings=surroundings,
            )
        )
        assert isinstance(self.engine.loop, SteppedLoop)
        self.engine.loop.pace = lambda: self._storm.step_s(self.name)
        self._listen(create(self.engine, ServerConfig()))
        self._storm.note(f"{self.name} is up, epoch {self.engine.info().epoch[:4]}")

    def _connect(self, config: KVTransferConfig, pool: KVPool, epoch: str, notify: Notify) -> Connector:
        options = config.kv_connector_extra_config
        self.connector = SimConnector(self._place, self.name, options, pool, epoch, notify)
        return self.connector

    def _listen(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            _busy_at_times(app, self._storm),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
        )
        config.load()
        state = self.server = ServerState()
        self._place.network.listen((self.name, HTTP_PORT), lambda: HttpToolsProtocol(config, state, {}))


def _busy_at_times(app: ASGIApp, storm: Storm) -> ASGIApp:
    """The app behind a proxy that answers 503 when it feels like it."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if not storm.is_busy():
            await app(scope, receive, send)
            return
        storm.note(f"503 for {scope['path']}")
        body = b'{"error": {"message": "busy", "type": "ServiceUnavailableError", "param": null, "code": 503}}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return answer
