"""Who belongs to the fleet: engines that the sources name join; others leave, and are forgotten when nothing refers to
them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fourhop.router.discovery.changes import changes, is_gone
from fourhop.router.discovery.follow import Discovery
from fourhop.router.discovery.registrations import Registrations
from fourhop.router.discovery.source import check_engine_url
from fourhop.router.fleet import Fleet
from fourhop.router.ledger import HoldState, Ledger
from fourhop.router.migration import Migration
from fourhop.router.policy import EngineRole
from fourhop.router.worker import Worker
from fourhop.service import json_response, read_body
from fourhop.wire.errors import ClientError, Forbidden, FourhopError, NotFound, StartError
from fourhop.wire.join import JOIN_PATH, LEAVE_PATH, JoinRequest, LeaveRequest, MemberAnswer

log = logging.getLogger(__name__)

Hire = Callable[[str, EngineRole], Worker]


class Membership:
    """Makes the fleet what `discovery` wants. `on_gone` is called with the name of an engine that was forgotten.

    Nothing here waits for an engine but `leave`, which is asked for over HTTP.
    """

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        discovery: Discovery,
        migration: Migration,
        registrations: Registrations | None,
        wall_clock: Callable[[], float],
    ) -> None:
        self.on_gone: Callable[[str], None] = lambda name: None
        self._hire: Hire | None = None
        self._fleet = fleet
        self._ledger = ledger
        self._discovery = discovery
        self._migration = migration
        self._registrations = registrations
        self._wall_clock = wall_clock

    async def start(self, hire: Hire) -> None:
        """Look once at the engines that are known without asking. `hire` connects to one."""
        self._hire = hire
        await self._fleet.start([hire(url, role) for url, role in self._discovery.wanted().items()])
        self._discovery.start()

    def settle(self) -> None:
        """Forget engines that left and have nothing any more, and follow what the sources say."""
        now_s = self._wall_clock()
        for worker in [worker for worker in self._fleet.workers.values() if worker.is_leaving]:
            if is_gone(worker, self._ledger.at(worker.name), now_s):
                self._forget(worker)
        self.follow()

    def follow(self) -> None:
        """Let engines join, leave and stay, as the sources say at this moment."""
        found = changes(self._discovery.wanted(), self._fleet.workers.values())
        for name in found.leaves:
            log.info("engine %s leaves", name)
            self._fleet.workers[name].is_leaving = True
        for name in found.stays:
            log.info("engine %s stays", name)
            self._fleet.workers[name].is_leaving = False
        if found.joins:
            assert self._hire is not None
            self._fleet.join([self._hire(url, role) for url, role in found.joins.items()])
            for url, role in found.joins.items():
                log.info("engine %s joins as %s", url, role)

    def join(self, request: JoinRequest) -> MemberAnswer:
        """An engine says that it is there. Raises ClientError for what is no URL, or has another role here."""
        url = request.url.rstrip("/")
        try:
            check_engine_url(url)
        except StartError as error:
            raise ClientError(str(error), param="url") from None
        known = self._takes_registrations()
        known.put(url, request.role, request.every_s)
        role = self._discovery.wanted()[url]
        if role != request.role:
            known.remove(url)
            raise ClientError(f"{url} is a {role} engine of this router", param="role")
        self.follow()
        return self._answer(self._fleet.workers[url])

    async def leave(self, request: LeaveRequest) -> MemberAnswer:
        """An engine says that it goes; what it decodes is moved at once. Raises NotFound if it had not joined."""
        url = request.url.rstrip("/")
        if not self._takes_registrations().remove(url):
            raise NotFound(f"{url[:200]} has not joined this router", param="url")
        self.follow()
        worker = self._fleet.workers[url]
        return self._answer(worker, await self._move_from(worker) if worker.is_leaving else 0)

    async def _move_from(self, worker: Worker) -> int:
        try:
            return await self._migration.move_from(worker)
        except FourhopError as error:
            log.warning("engine %s did not move its requests: %s", worker.name, error.message)
            return 0

    def _takes_registrations(self) -> Registrations:
        if self._registrations is None:
            raise Forbidden("engines do not register with this router: it was started without --engines-join")
        return self._registrations

    def _forget(self, worker: Worker) -> None:
        self._fleet.drop(worker)
        for hold in self._ledger.at(worker.name):
            self._ledger.end(hold, HoldState.EXPIRED)
        self.on_gone(worker.name)
        log.info("engine %s is gone", worker.name)

    def _answer(self, worker: Worker, num_migrated: int = 0) -> MemberAnswer:
        return MemberAnswer(worker.name, worker.role, worker.is_leaving, worker.in_flight, num_migrated)


def membership_routes(membership: Membership) -> list[Route]:
    async def join(request: Request) -> Response:
        return json_response(membership.join(await read_body(request, JoinRequest)))

    async def leave(request: Request) -> Response:
        return json_response(await membership.leave(await read_body(request, LeaveRequest)))

    return [Route(JOIN_PATH, join, methods=["POST"]), Route(LEAVE_PATH, leave, methods=["POST"])]
