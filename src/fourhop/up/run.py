"""`fourhop up`, top to bottom: engines, router, frontend; and back."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
from contextlib import AsyncExitStack, ExitStack
from typing import Literal

from prometheus_client import CollectorRegistry

from fourhop import service
from fourhop.checkpoint import Checkpoint
from fourhop.engine.config import EngineConfig
from fourhop.frontend import app as frontend_app
from fourhop.frontend import load as frontend_load
from fourhop.frontend.config import FrontendConfig
from fourhop.router.app import Router
from fourhop.router.config import GoodputConfig, RouterConfig
from fourhop.router.guard import guard, with_admin
from fourhop.router.routes import router_routes
from fourhop.service import ServerConfig, TracingConfig
from fourhop.tokens.connection import open_session
from fourhop.tokens.worker import RemoteWorker
from fourhop.up.children import Children, engine_command
from fourhop.up.display import Display, summary
from fourhop.up.plan import EnginePlan, UpConfig, engines_per_core, flags_of, plan_engines
from fourhop.up.vllm import find_vllm, plan_vllms

ENGINE_DRAIN_S = 5.0
"""Engines are stopped after the frontend has drained, so what they still do is nobody's."""
STOP_TIMEOUT_S = 10.0


async def run_up(
    checkpoint: Checkpoint,
    config: UpConfig,
    goodput: GoodputConfig,
    server: ServerConfig,
    frontend: FrontendConfig,
    engine: EngineConfig,
    tracing: TracingConfig,
    log_level: str,
    listener: socket.socket,
) -> None:
    """Start everything, serve on `listener` until a signal, stop everything. Raises StartError."""
    frontend_load.check(checkpoint, frontend)
    names = frontend.served_model_name or (checkpoint.name,)
    is_vllm = config.engine == "vllm"
    plans = await (_plan_vllms if is_vllm else _plan)(checkpoint, config, engine, names[0], log_level, tracing)
    display = Display(plans)
    for plan in plans:
        display.line(plan.name, f"{plan.shown}  # on core {','.join(map(str, plan.cores))}")
    if engines_per_core(plans) > 1:
        display.line("up", f"{len(plans)} engines share {len(os.sched_getaffinity(0))} cores")

    def command(plan: EnginePlan) -> list[str]:
        return engine_command(plan, os.getpid())

    registry = CollectorRegistry()
    async with AsyncExitStack() as stack:
        tracer_of = stack.enter_context(service.open_traces(tracing, registry))
        children = await stack.enter_async_context(Children(plans, command, display, stop_timeout_s=STOP_TIMEOUT_S))
        with display:
            await children.ready()
        window = engine.max_model_len if is_vllm else await _window(plans)
        router_config = _router_config(plans, "nixl" if is_vllm else None)
        router = Router(router_config, goodput, registry=registry, tracer=tracer_of("router"))

        async def health() -> str | None:
            return router.health()

        app = frontend_app.create(
            dataclasses.replace(frontend, max_model_len=window),
            checkpoint,
            with_admin(server, goodput),
            router,
            health=health,
            details=lambda: {"degraded": router.degraded.lasting()},
            routes=router_routes(router, names),
            resources=router.running,
            registry=registry,
            tracer=tracer_of("frontend"),
        )
        guard(app, goodput)
        url = f"http://{server.host}:{listener.getsockname()[1]}"

        def started() -> None:
            connector = "nixl" if is_vllm else config.connector
            pids = children.pids()
            print(summary(url, names[0], plans, pids, os.getpid(), connector if config.prefill else None), flush=True)

        await service.serve(app, server, listener=listener, started=started)


async def _plan_vllms(
    checkpoint: Checkpoint, config: UpConfig, engine: EngineConfig, name: str, log_level: str, tracing: TracingConfig
) -> list[EnginePlan]:
    ports = _free_ports(2 * config.num_engines)
    return plan_vllms(
        config,
        engine,
        checkpoint.folder,
        name,
        version=await find_vllm(config.vllm_python),
        ports=ports[: config.num_engines],
        side_ports=ports[config.num_engines :],
        cores=sorted(os.sched_getaffinity(0)),
    )


async def _plan(
    checkpoint: Checkpoint, config: UpConfig, engine: EngineConfig, name: str, log_level: str, tracing: TracingConfig
) -> list[EnginePlan]:
    flags = [*flags_of(engine), *flags_of(tracing), "--drain-timeout-s", str(ENGINE_DRAIN_S)]
    flags += ["--served-model-name", name] if name != checkpoint.name else []
    flags += ["--log-level", log_level] if log_level != "info" else []
    cores = sorted(os.sched_getaffinity(0))
    return plan_engines(config, checkpoint.name, ports=_free_ports(config.num_engines), cores=cores, flags=flags)


def _free_ports(count: int) -> list[int]:
    """Ports that are free at this moment. All are held together, so that they differ."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(service.bind(ServerConfig(port=0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


async def _window(plans: list[EnginePlan]) -> int | None:
    """The longest sequence that every engine takes: a small pool allows less than the model."""
    async with open_session() as session:
        infos = await asyncio.gather(*(RemoteWorker(plan.url, session).check() for plan in plans))
    return min((info.max_model_len for info in infos if info is not None), default=None)


def _router_config(plans: list[EnginePlan], handoff: Literal["nixl"] | None) -> RouterConfig:
    return RouterConfig(
        handoff=handoff,
        prefill=tuple(plan.url for plan in plans if plan.role == "prefill"),
        decode=tuple(plan.url for plan in plans if plan.role == "decode"),
    )
