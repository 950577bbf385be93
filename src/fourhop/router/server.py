"""A router as a process of its own, perhaps one of several."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from fourhop.router.app import Router
from fourhop.router.config import GoodputConfig, RouterConfig
from fourhop.router.guard import guard, with_admin
from fourhop.router.routes import health_route, router_routes
from fourhop.service import ServerConfig, create_app
from fourhop.service.tracing import Tracer

Healths = Callable[[], Awaitable[Sequence[bytes]]]
"""What the other processes answer at `/health`, those that answer."""


async def nobody() -> Sequence[bytes]:
    """A process without others."""
    return []


def create(
    config: RouterConfig,
    goodput: GoodputConfig,
    server: ServerConfig,
    registry: CollectorRegistry,
    tracer: Tracer | None = None,
    others: Healths = nobody,
) -> Starlette:
    """The app of a router process. One that is started again drains the engines that `others` drain."""
    router = Router(config, goodput, registry=registry, tracer=tracer)

    @asynccontextmanager
    async def resources() -> AsyncIterator[None]:
        async with router.running():
            for name in {name for health in await others() for name in draining(health)}:
                if (worker := router.fleet.find(name)) is not None:
                    worker.is_draining = True
            yield

    app = create_app(
        routes=[*router_routes(router), health_route(router)],
        config=with_admin(server, goodput),
        registry=registry,
        resources=resources,
    )
    guard(app, goodput)
    return app


class _Engine(msgspec.Struct):
    engine: str
    draining: bool


class _Health(msgspec.Struct):
    engines: list[_Engine]


def draining(health: bytes) -> list[str]:
    """The engines that a router says it drains, by its `/health`; none by an answer that is no such thing."""
    try:
        engines = msgspec.json.decode(health, type=_Health).engines
    except msgspec.MsgspecError:
        return []
    return [one.engine for one in engines if one.draining]
