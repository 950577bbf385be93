"""How tiers are joined into processes: what `serve`, `frontend` and `engine` run.

The engine's modules, and torch with them, are imported by those that run an engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from fourhop import checkpoint, service
from fourhop.checkpoint import Checkpoint
from fourhop.engine.config import EngineConfig
from fourhop.frontend import app as frontend_app
from fourhop.frontend import load as frontend_load
from fourhop.frontend import remote as frontend_remote
from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.remote import RemoteFrontend, TextServer
from fourhop.kv.config import KVEventsConfig, KVTransferConfig
from fourhop.router.config import GoodputConfig, RouterConfig
from fourhop.service import ServerConfig, Siblings, Together, TracingConfig
from fourhop.service.progress import loading
from fourhop.tokens.address import check_url
from fourhop.tokens.connection import Timeouts, open_session
from fourhop.tokens.join import JoinConfig, registration
from fourhop.tokens.routes import token_routes
from fourhop.tokens.traced import traced
from fourhop.tokens.upstream import Upstream
from fourhop.tokens.worker import ABORT_PATH, MIGRATE_PATH, RemoteWorker
from fourhop.wire.errors import PeerError, StartError
from fourhop.wire.worker import WorkerInfo

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from fourhop.engine.server import Engine


IDLE_LOOK_S = 0.05
"""Between two looks whether an engine that stops has anything left."""

ROUTER_SHARED_PATHS = ("/router/", ABORT_PATH, MIGRATE_PATH)
"""What all processes of a router are told, or asked: engines that drain, requests of which one of them has each."""


@dataclass(frozen=True)
class UpstreamConfig:
    """Where tokens come from.

    Attributes:
        upstream: URL of a router, an engine or a vLLM. Default: none, only text endpoints work.
        render_url: URL of a vLLM or a frontend that renders and derenders in place of this one. Needs `--upstream`.
        upstream_api_key: Sent to the upstream, and to who renders, as a bearer token.
        first_chunk_timeout_s: Patience for the upstream's first chunk, its queue included.
        idle_timeout_s: Patience between two chunks.
    """

    upstream: str | None = None
    render_url: str | None = None
    upstream_api_key: str | None = field(default=None, repr=False)
    first_chunk_timeout_s: float = 120.0
    idle_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for url in (self.upstream, self.render_url):
            if url is not None:
                check_url(url)
        if self.render_url is not None and self.upstream is None:
            raise ValueError(
                "--render-url needs --upstream: a frontend without text and without tokens has nothing to do"
            )
        self.timeouts()

    def timeouts(self) -> Timeouts:
        return Timeouts(first_byte_s=self.first_chunk_timeout_s, idle_s=self.idle_timeout_s)


async def run_serve(
    model: str,
    config: FrontendConfig,
    transfer: KVTransferConfig | None,
    events: KVEventsConfig | None,
    engine_config: EngineConfig,
    server: ServerConfig,
    tracing: TracingConfig,
) -> None:
    """One process: the frontend's token server is the engine itself, and its window is the engine's."""
    with service.bind(server) as listener:
        found = checkpoint.find(model)
        frontend_load.check(found, config)
        async with AsyncExitStack() as stack:
            names = config.served_model_name or (model,)
            registry = CollectorRegistry()
            tracer_of = stack.enter_context(service.open_traces(tracing, registry))
            engine = await _open_engine(stack, engine_config, found, names[0], transfer, events)
            from fourhop.engine import metrics

            tokens = traced(engine, tracer_of("engine"))
            metrics.register(registry, engine.loop, names[0])

            async def health() -> str | None:
                return engine.health()

            app = frontend_app.create(
                replace(config, max_model_len=engine.info().max_model_len),
                found,
                server,
                tokens,
                health=health,
                routes=token_routes(tokens, abort=engine.abort, models=names),
                registry=registry,
                tracer=tracer_of("frontend"),
            )
            await service.serve(app, server, listener=listener)
            _check(engine)


async def run_frontend(
    model: str,
    upstream: UpstreamConfig,
    config: FrontendConfig,
    server: ServerConfig,
    tracing: TracingConfig,
    *,
    listener: socket.socket,
    started: Callable[[], None] | None = None,
    siblings: Siblings | None = None,
) -> None:
    """A frontend alone; its token server, if it has one, is at the other end of a connection."""
    if upstream.upstream is None:
        if tracing.otlp_endpoint is not None:
            raise StartError("--otlp-endpoint needs --upstream: spans are of requests that generate")
        found = checkpoint.find(model, weights=False)
        await _serve(frontend_app.create(config, found, server), server, listener, started, siblings)
        return
    registry = CollectorRegistry()
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        tracer = stack.enter_context(service.open_traces(tracing, registry))("frontend")
        key = upstream.upstream_api_key
        tokens = Upstream(upstream.upstream, session, timeouts=upstream.timeouts(), api_key=key)
        health = partial(_illness, RemoteWorker(upstream.upstream, session, api_key=key))
        if upstream.render_url is not None:
            text = TextServer(upstream.render_url, session, upstream.timeouts(), key)
            remote = RemoteFrontend(text, traced(tokens, tracer))
            app = frontend_remote.create(remote, server, health, registry)
        else:
            found = checkpoint.find(model, weights=False)
            app = frontend_app.create(config, found, server, tokens, health=health, registry=registry, tracer=tracer)
        await _serve(app, server, listener, started, siblings)


async def run_router(
    config: RouterConfig,
    goodput: GoodputConfig,
    server: ServerConfig,
    tracing: TracingConfig,
    *,
    listener: socket.socket,
    started: Callable[[], None] | None = None,
    siblings: Siblings | None = None,
) -> None:
    """A router alone."""
    from fourhop.router.server import create, nobody

    registry = CollectorRegistry()
    others = nobody if siblings is None else partial(siblings.hear, "/health")
    if siblings is not None and goodput.api_keys is not None:
        log.warning("the limits of --api-keys hold for each of the %d workers", len(siblings.doors))
    with service.open_traces(tracing, registry) as tracer_of:
        app = create(config, goodput, server, registry, tracer_of("router"), others)
        await _serve(app, server, listener, started, siblings)


async def _serve(
    app: Starlette,
    server: ServerConfig,
    listener: socket.socket,
    started: Callable[[], None] | None,
    siblings: Siblings | None,
) -> None:
    """Serve, as one of several processes if there are siblings."""
    if siblings is not None:
        app.add_middleware(Together, siblings=siblings)
    door = None if siblings is None else siblings.door
    await service.serve(app, server, listener=listener, door=door, started=started)


async def _illness(worker: RemoteWorker) -> str | None:
    """Why the upstream cannot serve, None when it can."""
    try:
        await worker.check()
    except PeerError as error:
        return error.message
    return None


async def run_engine(
    model: str,
    name: str | None,
    transfer: KVTransferConfig | None,
    events: KVEventsConfig | None,
    config: EngineConfig,
    server: ServerConfig,
    join: JoinConfig,
    tracing: TracingConfig,
) -> None:
    """An engine alone, known to the routers that it joins while it listens."""
    with service.bind(server) as listener:
        url = join.url_of(server, listener.getsockname()[1]) if join.join else ""
        found = checkpoint.find(model)
        registry = CollectorRegistry()
        async with AsyncExitStack() as stack:
            tracer_of = stack.enter_context(service.open_traces(tracing, registry))
            engine = await _open_engine(stack, config, found, name or model, transfer, events)
            from fourhop.engine.app import create

            app = create(engine, server, registry, tracer_of("engine"))
            member = await stack.enter_async_context(registration(join, url))

            async def stopping() -> None:
                if join.join:
                    await member.leave()
                    await until_idle(engine, server.drain_timeout_s)

            await service.serve(app, server, listener=listener, started=member.start, stopping=stopping)
            _check(engine)


async def until_idle(engine: Engine, timeout_s: float) -> None:
    """Until an engine that has left its routers has nothing to do and holds nothing for others, or has failed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while engine.loop.failure is None and _is_busy(engine.info()):  # noqa: ASYNC110 (it does not tell)
                await asyncio.sleep(IDLE_LOOK_S)


def _is_busy(info: WorkerInfo) -> bool:
    return info.num_running > 0 or info.num_waiting > 0 or info.num_held_blocks > 0


async def _open_engine(
    stack: AsyncExitStack,
    config: EngineConfig,
    found: Checkpoint,
    name: str,
    transfer: KVTransferConfig | None,
    events: KVEventsConfig | None,
) -> Engine:
    """An engine that lives as long as the stack, its weights loaded under a progress bar."""
    try:
        with service.ended_by_signals():
            from fourhop.engine.open import open_engine
    except ModuleNotFoundError as error:
        raise StartError(f"an engine needs {error.name}: pip install 'fourhop[engine]'") from None
    with loading(found.name.rpartition("/")[2]) as progress:
        opening = open_engine(config, found.folder, name=name, transfer=transfer, events=events, progress=progress)
        engine = await stack.enter_async_context(opening)
    # A process whose engine failed drains, answering what is open, and ends; whoever watches it starts another.
    engine.loop.on_failure = lambda: os.kill(os.getpid(), signal.SIGTERM)
    return engine


def _check(engine: Engine) -> None:
    """Raises StartError if serving ended because the engine failed."""
    if engine.loop.failure is not None:
        raise StartError(engine.loop.failure)
