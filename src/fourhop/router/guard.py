"""The edge of a router: which keys get in, and who may change the fleet."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from fourhop.router.config import GoodputConfig
from fourhop.router.keys import ACCOUNT, Account, KeyLimits, read_keys
from fourhop.router.migration import DRAIN_PATH, UNDRAIN_PATH
from fourhop.service import ServerConfig
from fourhop.service.answers import error_answer
from fourhop.service.app import GUARDED_PATHS, given_key
from fourhop.tokens.worker import ABORT_PATH, MIGRATE_PATH
from fourhop.wire.errors import Forbidden, FourhopError, Unauthorized
from fourhop.wire.join import JOIN_PATH, LEAVE_PATH

ADMIN_PATHS = frozenset({JOIN_PATH, LEAVE_PATH, DRAIN_PATH, UNDRAIN_PATH, MIGRATE_PATH})
"""What changes the fleet, or where the requests of others run."""

FREE_PATHS = frozenset({ABORT_PATH})
"""What counts against no limit: a key that has reached its own may still end what it began."""


def guard(app: Starlette, goodput: GoodputConfig) -> None:
    """Let in only clients with a key of the file, each within its limits, and to the fleet only the administrator.

    Raises StartError for a bad file.
    """
    keys = {} if goodput.api_keys is None else read_keys(goodput.api_keys)
    server: ServerConfig = app.state.server_config
    if keys or server.api_key or goodput.admin_key is not None:
        app.add_middleware(Guard, keys=keys, admin_key=goodput.admin_key, clock=time.monotonic)


def with_admin(server: ServerConfig, goodput: GoodputConfig) -> ServerConfig:
    """A server that needs a key takes the administrator's too."""
    if not server.api_key or goodput.admin_key is None:
        return server
    return replace(server, api_key=(*server.api_key, goodput.admin_key))


@dataclass
class Guard:
    """Finds out whose request it is. The administrator's key opens everything and has no limits."""

    app: ASGIApp
    keys: Mapping[str, KeyLimits]
    admin_key: str | None
    clock: Callable[[], float]
    _accounts: list[tuple[bytes, Account]] = field(init=False)

    def __post_init__(self) -> None:
        self._accounts = [(key.encode(), Account(limits)) for key, limits in self.keys.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED_PATHS):
            await self.app(scope, receive, send)
            return
        try:
            account = self._owner(scope["path"], given_key(Headers(scope=scope)).encode("latin-1"))
            counted = None if scope["path"] in FREE_PATHS else account
            if counted is not None:
                counted.enter(self.clock())
        except FourhopError as error:
            answer = error_answer(error)
            if isinstance(error, Unauthorized):
                answer.headers["WWW-Authenticate"] = "Bearer"
            await answer(scope, receive, send)
            return
        token = ACCOUNT.set(account)
        try:
            await self.app(scope, receive, send)
        finally:
            ACCOUNT.reset(token)
            if counted is not None:
                counted.leave()

    def _owner(self, path: str, given: bytes) -> Account | None:
        """Whose request it is; None for the administrator's, and where clients need no keys."""
        if self.admin_key is not None and hmac.compare_digest(given, self.admin_key.encode()):
            return None
        if path in ADMIN_PATHS and self.admin_key is not None:
            raise Unauthorized("the administrator's key is required: Authorization: Bearer KEY")
        if path in ADMIN_PATHS:
            raise Forbidden("no client may do this; for the administrator start the router with --admin-key")
        return self._account(given) if self.keys else None

    def _account(self, given: bytes) -> Account:
        """Every key is compared, so the time taken does not tell which one came close."""
        found = [account for key, account in self._accounts if hmac.compare_digest(given, key)]
        if not found:
            raise Unauthorized("a valid API key is required: Authorization: Bearer KEY")
        return found[0]
