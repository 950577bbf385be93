"""The app of a server: its routes, metrics and version, and the edge at which every request gets its answer.

Errors are raised anywhere as `FourhopError` and answered here; anything else that is raised is logged with its
traceback and answered as a 500 that tells nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from inspect import iscoroutinefunction
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fourhop import __version__
from fourhop.service.answers import INTERNAL_ERROR, SHUTTING_DOWN, error_answer, json_response
from fourhop.service.config import ServerConfig
from fourhop.service.requests import client_request_id
from fourhop.wire.errors import ErrorBody, ErrorResponse, FourhopError, Unauthorized

log = logging.getLogger(__name__)

GUARDED_PATHS = ("/v1/", "/inference/", "/kv/", "/router/")


def create_app(
    *,
    routes: Sequence[BaseRoute],
    config: ServerConfig,
    registry: CollectorRegistry,
    resources: Callable[[], AbstractAsyncContextManager[None]] | None = None,
) -> Starlette:
    """The app of one server: its routes, `/metrics` of its registry, `/version`, and the edge around them all.

    `resources` is entered before the first request and left after the last.
    """

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    app = _App(middleware=[Middleware(_Edge, config=config)])
    app.router = _Table(
        [*routes, Route("/metrics", metrics), Route("/version", version)],
        redirect_slashes=False,
        lifespan=None if resources is None else lambda app: resources(),
    )
    app.state.server_config = config
    return app


class _App(Starlette):
    """Starlette without its own two layers around the routes: `_Edge` answers every error."""

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = self.router.app
        for layer, args, options in reversed(self.user_middleware):
            app = layer(app, *args, **options)
        return app


class _Table(Router):
    """Starlette's router, which tries one route after the other, behind a table of the paths without parameters."""

    def __init__(self, routes: Sequence[BaseRoute], **options: Any) -> None:
        super().__init__(routes, **options)
        plain = [
            route
            for route in routes
            if isinstance(route, Route) and "{" not in route.path and iscoroutinefunction(route.endpoint)
        ]
        self._plain = {(method, route.path): route for route in reversed(plain) for method in route.methods or ()}

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._plain.get((scope.get("method", ""), scope.get("path", "")))
        if route is None or scope["type"] != "http" or scope.get("root_path"):
            await super().app(scope, receive, send)
            return
        response = await route.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


class _Edge:
    """The outermost layer of a request: the key check, the echoed request id, and an answer whatever happens."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._keys = [key.encode() for key in config.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = client_request_id(scope)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if client_id:
                    MutableHeaders(scope=message)["X-Request-Id"] = client_id
            await send(message)

        try:
            if not self._may_enter(scope):
                raise Unauthorized("a valid API key is required: Authorization: Bearer KEY")
            await self._app(scope, receive, send_with_id)
            return
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            # The deadline of a drain. The request's task ends here, with an answer rather than a cut connection.
            answer = error_answer(SHUTTING_DOWN)
        except Exception as error:  # the edge of the process: the one place that answers for bugs
            known = None if started else _known_error(scope, error)
            if known is None:
                log.exception("%s %s failed", scope["method"], scope["path"])
            answer = known or error_answer(INTERNAL_ERROR)
        if not started:
            await answer(scope, receive, send_with_id)

    def _may_enter(self, scope: Scope) -> bool:
        if not self._keys or not scope["path"].startswith(GUARDED_PATHS):
            return True
        given = given_key(Headers(scope=scope)).encode("latin-1")
        # Every key is compared, so the time taken does not tell which one came close.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)


def given_key(headers: Headers) -> str:
    """The key a client gives: as a bearer token, or as Anthropic's clients do."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def _known_error(scope: Scope, error: Exception) -> Response | None:
    """The answer to an error that is no bug: ours, or Starlette's of an unknown path or a method it does not take."""
    method, path = scope["method"], scope["path"]
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase
        message, kind = f"{phrase}: {method} {path[:200]}", f"{phrase.title().replace(' ', '')}Error"
        body = ErrorResponse(ErrorBody(message, kind, None, error.status_code))
        return json_response(body, status=error.status_code, headers=error.headers)
    if not isinstance(error, FourhopError):
        return None
    if error.status >= 500:
        log.warning("%s %s answered %d: %s", method, path, error.status, error.message)
    answer = error_answer(error)
    if isinstance(error, Unauthorized):
        answer.headers["WWW-Authenticate"] = "Bearer"
    return answer
