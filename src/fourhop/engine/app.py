"""The engine's HTTP face: the token endpoints, health, and what a router wants to know."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fourhop.engine.metrics import EngineCollector
from fourhop.engine.server import Engine
from fourhop.service import ServerConfig, create_app, json_response
from fourhop.tokens.routes import token_routes


def create(engine: Engine, config: ServerConfig) -> Starlette:
    """The app of one engine. The engine is opened and closed by the caller."""

    async def health(request: Request) -> Response:
        reason = engine.health()
        return json_response({"status": reason or "ok"}, status=503 if reason else 200)

    async def worker(request: Request) -> Response:
        return json_response(engine.info())

    info = engine.info()
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine.loop, info.model))
    routes = token_routes(engine, model=info.model, abort=engine.abort)
    return create_app(
        routes=[*routes, Route("/health", health), Route("/worker", worker)], config=config, registry=registry
    )
