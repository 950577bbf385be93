"""An engine's word to routers that it is there, said again and again, and that it goes (`fourhop engine --join`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from fourhop.service import ServerConfig
from fourhop.service.tasks import end_tasks
from fourhop.tokens.address import check_url
from fourhop.tokens.connection import Session, Timeouts, call, open_session, request_headers
from fourhop.wire.errors import PeerError, StartError
from fourhop.wire.join import JOIN_PATH, LEAVE_PATH, JoinRequest, LeaveRequest

log = logging.getLogger(__name__)

PATIENCE = Timeouts(connect_s=2.0, first_byte_s=3.0, idle_s=2.0)
LEAVE_TIMEOUT_S = 4.0
"""Beyond the time in which a router asks this engine to move its requests."""

EVERY_INTERFACE = ("", "0.0.0.0", "::")


@dataclass(frozen=True)
class JoinConfig:
    """Routers that the engine registers with.

    Attributes:
        join: URLs of routers, which were started with `--engines-join`; several also as one word with commas. The
            engine says to each that it is there, and when it stops that it goes. Default: none.
        join_as: What the engine is to do there.
        advertise_url: URL at which routers reach this engine. Default: made of host and port.
        join_interval_s: Time from one word to the next; without any for three times as long the engine is taken to be
            gone.
        join_key: The routers' `--admin-key`.
    """

    join: tuple[str, ...] = ()
    join_as: Literal["prefill", "decode"] | None = None
    advertise_url: str | None = None
    join_interval_s: float = 5.0
    join_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for url in (*self.routers, *([] if self.advertise_url is None else [self.advertise_url])):
            check_url(url)
        if self.join and self.join_as is None:
            raise ValueError("--join needs --join-as prefill or --join-as decode")
        if not self.join and (self.join_as, self.join_key, self.advertise_url) != (None, None, None):
            raise ValueError("--join-as, --join-key and --advertise-url need --join URL")
        if not 0 < self.join_interval_s <= 3600:
            raise ValueError(f"join_interval_s must be a number of seconds up to 3600, not {self.join_interval_s}")

    @property
    def routers(self) -> list[str]:
        return [url.rstrip("/") for word in self.join for url in word.split(",")]

    def url_of(self, server: ServerConfig, port: int) -> str:
        """Where routers reach an engine that listens on `port`. Raises StartError if that is not known."""
        if self.advertise_url is not None:
            return self.advertise_url
        if server.host in EVERY_INTERFACE:
            raise StartError(
                f"--join with --host {server.host or 'empty'} needs --advertise-url: routers cannot call that"
            )
        host = f"[{server.host}]" if ":" in server.host else server.host
        return f"http://{host}:{port}"


class Registration:
    """One engine at several routers, which know nothing of one another. Each is told in a task of its own."""

    def __init__(
        self, config: JoinConfig, url: str, session: Session, sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        self._config = config
        self._url = url
        self._session = session
        self._sleep = sleep
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """The engine listens: say so from now on."""
        self._tasks = [asyncio.create_task(self._repeat(one), name=f"join {one}") for one in self._config.routers]

    async def leave(self) -> None:
        """The engine is about to stop: every router that answers moves its requests, and sends none any more."""
        await self.stop()
        message = msgspec.json.encode(LeaveRequest(self._url))
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await asyncio.gather(*(self._leave(router, message) for router in self._config.routers))
        except TimeoutError:
            log.warning("not every router was told that this engine goes")

    async def stop(self) -> None:
        """Say nothing more."""
        await end_tasks(self._tasks)
        self._tasks = []

    async def _leave(self, router: str, message: bytes) -> None:
        failure = await self._tell(router + LEAVE_PATH, message)
        if failure is not None:
            log.warning("could not tell %s that this engine goes: %s", router, failure)

    async def _repeat(self, router: str) -> None:
        """What a router answers is told when it changes."""
        assert self._config.join_as is not None
        message = msgspec.json.encode(JoinRequest(self._url, self._config.join_as, self._config.join_interval_s))
        before: str | None = "not asked yet"
        while True:
            failure = await self._tell(router + JOIN_PATH, message)
            if failure != before and failure is None:
                log.info("joined %s as %s at %s", router, self._config.join_as, self._url)
            elif failure != before:
                log.warning("could not join %s: %s", router, failure)
            before = failure
            await self._sleep(self._config.join_interval_s)

    async def _tell(self, url: str, message: bytes) -> str | None:
        """Why a router could not be told; None if it was."""
        headers = request_headers(self._config.join_key)
        try:
            async with call(self._session, "POST", url, timeouts=PATIENCE, body=message, headers=headers) as answer:
                await answer.read_all()
        except PeerError as error:
            return error.message
        return None


@asynccontextmanager
async def registration(
    config: JoinConfig, url: str, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> AsyncIterator[Registration]:
    """A registration that begins with its `start`, and says nothing more after the block."""
    async with open_session() as session:
        found = Registration(config, url, session, sleep)
        try:
            yield found
        finally:
            await found.stop()
