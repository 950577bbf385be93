"""The router's endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fourhop.router.history import history_route
from fourhop.router.membership import membership_routes
from fourhop.router.migration import migration_routes
from fourhop.service import json_response
from fourhop.tokens.routes import token_routes

if TYPE_CHECKING:
    from fourhop.router.app import Router


def router_routes(router: Router, models: Sequence[str] = ()) -> list[Route]:
    """What a router does for others: tokens, the moving of requests, engines that come and go, stories of requests.

    Its health is the process's affair.
    """
    return [
        *token_routes(router, abort=router.abort, models=models, routes=True),
        *migration_routes(router.migration),
        *membership_routes(router.membership),
        history_route(router.history),
    ]


def health_route(router: Router) -> Route:
    """`/health`: 200 while some engine can serve, what is missing for so many seconds, and what each engine is doing or
    why it is down.
    """

    async def health(request: Request) -> Response:
        reason = router.health()
        engines = [
            {
                "engine": worker.name,
                "role": worker.role,
                "down": worker.down,
                "draining": worker.is_draining,
                "leaving": worker.is_leaving,
                "in_flight": worker.in_flight,
            }
            for worker in router.fleet.workers.values()
        ]
        told = {"status": reason or "ok", "degraded": router.degraded.lasting(), "engines": engines}
        return json_response(told, status=503 if reason else 200)

    return Route("/health", health)
