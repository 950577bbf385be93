"""Engines that join and leave while the router runs: asked for over HTTP, or listed in a file that is read again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fourhop.router.config import RouterConfig, check_urls
from fourhop.router.fleet import Fleet, Worker
from fourhop.router.ledger import Ledger
from fourhop.router.migration import Migration
from fourhop.router.policy import EngineRole
from fourhop.service import json_response, read_body
from fourhop.wire.errors import ClientError, FourhopError, NotFound, StartError

log = logging.getLogger(__name__)

Hire = Callable[[str, EngineRole], Worker]


class EngineList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says: URLs of the engines, by role."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()

    def roles(self) -> dict[str, EngineRole]:
        sides: tuple[tuple[EngineRole, tuple[str, ...]], ...] = (("prefill", self.prefill), ("decode", self.decode))
        return {url: role for role, urls in sides for url in urls}


class JoinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /router/join`: the engine at the URL `worker` is this router's from now on."""

    worker: str
    role: EngineRole


class LeaveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /router/leave`: drain the engine, and forget it when it has nothing left."""

    worker: str


class Members(msgspec.Struct, frozen=True):
    """The engines after what was asked, those that are leaving among them."""

    prefill: list[str]
    decode: list[str]
    leaving: list[str]


def read_engines(path: Path) -> EngineList:
    """Raises StartError, naming what is wrong."""
    try:
        listed = msgspec.json.decode(path.read_bytes(), type=EngineList)
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise StartError(f"{path}: {error}") from None
    check_urls(listed.prefill + listed.decode)
    return listed


class Membership:
    """Who belongs to the fleet. An engine that leaves is drained, and gone when nothing is with it or held by it."""

    def __init__(self, config: RouterConfig, fleet: Fleet, ledger: Ledger, migration: Migration) -> None:
        self.hire: Hire | None = None
        self.on_gone: Callable[[str], None] = lambda name: None
        self._path = config.engines_file
        self._fleet = fleet
        self._ledger = ledger
        self._migration = migration
        self._seen: tuple[int, int] | None = None

    def begin(self, config: RouterConfig, hire: Hire) -> list[Worker]:
        """The engines to start with. Raises StartError for a file that cannot be read."""
        self.hire = hire
        listed = EngineList(config.prefill, config.decode)
        if self._path is not None:
            self._seen = self._signature()
            listed = read_engines(self._path)
        return [hire(url, role) for url, role in listed.roles().items()]

    async def join(self, url: str, role: EngineRole) -> None:
        """Take an engine in, or back. Raises ClientError for what is no URL, or one that has another role."""
        worker = self._fleet.workers.get(url)
        if worker is not None and worker.role != role:
            raise ClientError(f"{url} is a {worker.role} engine of this router", param="role")
        if worker is not None:
            if worker.is_leaving:
                worker.is_leaving = worker.is_draining = False
            return
        try:
            check_urls((url,))
        except StartError as error:
            raise ClientError(str(error), param="worker") from None
        assert self.hire is not None
        await self._fleet.join(self.hire(url, role))
        log.info("engine %s joins as %s", url, role)

    async def leave(self, url: str) -> None:
        worker = self._fleet.workers.get(url)
        if worker is None:
            raise NotFound(f"this router has no engine {url[:200]}", param="worker")
        worker.is_leaving = True
        await self._migration.drain(url)

    async def look(self) -> None:
        """Read the file if it changed, and forget engines that have nothing left."""
        if self._path is not None and (signature := self._signature()) != self._seen:
            self._seen = signature
            await self._follow(self._path)
        for worker in [worker for worker in self._fleet.workers.values() if worker.is_leaving]:
            if not worker.in_flight and not self._ledger.at(worker.name):
                await self._fleet.drop(worker)
                self.on_gone(worker.name)
                log.info("engine %s is gone", worker.name)

    def members(self) -> Members:
        workers = list(self._fleet.workers.values())
        return Members(
            prefill=_names(worker for worker in workers if worker.role == "prefill" and not worker.is_leaving),
            decode=_names(worker for worker in workers if worker.role == "decode" and not worker.is_leaving),
            leaving=_names(worker for worker in workers if worker.is_leaving),
        )

    async def _follow(self, path: Path) -> None:
        """Make the fleet what the file says. One that says nothing sensible changes nothing."""
        try:
            wanted = read_engines(path).roles()
        except StartError as error:
            log.warning("the engines stay as they are: %s", error)
            return
        for worker in list(self._fleet.workers.values()):
            if wanted.get(worker.name) != worker.role and not worker.is_leaving:
                await self._try(self.leave(worker.name))
        for url, role in wanted.items():
            await self._try(self.join(url, role))

    async def _try(self, change: Awaitable[None]) -> None:
        try:
            await change
        except FourhopError as error:
            log.warning("%s", error.message)

    def _signature(self) -> tuple[int, int] | None:
        """What changes when the file does; None while it is not there."""
        assert self._path is not None
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size


def _names(workers: Iterable[Worker]) -> list[str]:
    return [worker.name for worker in workers]


def membership_routes(membership: Membership) -> list[Route]:
    async def join(request: Request) -> Response:
        body = await read_body(request, JoinRequest)
        await membership.join(body.worker, body.role)
        return json_response(membership.members())

    async def leave(request: Request) -> Response:
        await membership.leave((await read_body(request, LeaveRequest)).worker)
        return json_response(membership.members())

    return [Route("/router/join", join, methods=["POST"]), Route("/router/leave", leave, methods=["POST"])]
