"""The engine's HTTP face: the token endpoints, health, and what a router wants to know."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fourhop.engine import metrics
from fourhop.engine.server import Engine
from fourhop.service import ServerConfig, create_app, json_response, read_body
from fourhop.service.tracing import Tracer
from fourhop.tokens.routes import token_routes
from fourhop.tokens.traced import traced
from fourhop.wire.worker import MigrateAnswer, MigrateRequest, PrefixAnswer, PrefixRequest, RenewAnswer, RenewRequest


def create(
    engine: Engine, config: ServerConfig, registry: CollectorRegistry | None = None, tracer: Tracer | None = None
) -> Starlette:
    """The app of one engine. The engine is opened and closed by the caller."""

    async def health(request: Request) -> Response:
        reason = engine.health()
        return json_response({"status": reason or "ok"}, status=503 if reason else 200)

    async def worker(request: Request) -> Response:
        return json_response(engine.info())

    async def leases(request: Request) -> Response:
        return json_response(await engine.leases())

    async def renew(request: Request) -> Response:
        body = await read_body(request, RenewRequest)
        return json_response(RenewAnswer(await engine.renew(body.ticket_ids)))

    async def prefix(request: Request) -> Response:
        ticket = await engine.hold_prefix(await read_body(request, PrefixRequest))
        return json_response(PrefixAnswer(None if ticket is None else msgspec.to_builtins(ticket)))

    async def migrate(request: Request) -> Response:
        body = await read_body(request, MigrateRequest)
        return json_response(MigrateAnswer(await engine.migrate(body.request_ids)))

    info = engine.info()
    registry = registry or CollectorRegistry()
    metrics.register(registry, engine.loop, info.model)
    routes = token_routes(traced(engine, tracer), models=[info.model], abort=engine.abort)
    routes += [
        Route("/health", health),
        Route("/worker", worker),
        Route("/kv/leases", leases),
        Route("/kv/renew", renew, methods=["POST"]),
        Route("/kv/prefix", prefix, methods=["POST"]),
        Route("/inference/v1/migrate", migrate, methods=["POST"]),
    ]
    return create_app(routes=routes, config=config, registry=registry)
