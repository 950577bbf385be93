"""Moving requests while they run: an engine is drained, or one request is sent to another engine.

The engine ends the stream with a ticket for what it has computed, and `split` goes on elsewhere at the same token.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fourhop.router.fleet import Fleet
from fourhop.router.run import Run
from fourhop.router.worker import Worker
from fourhop.service import json_response, read_body
from fourhop.service.fallbacks import Fallbacks
from fourhop.tokens.worker import ID_PREFIX, MIGRATE_PATH
from fourhop.wire.errors import ClientError, FourhopError, NotFound, PeerRefused
from fourhop.wire.worker import MigrateAnswer

log = logging.getLogger(__name__)


DRAIN_PATH = "/router/drain"
UNDRAIN_PATH = "/router/undrain"


class DrainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /router/drain` and `/router/undrain`: the engine's URL, as the router was given it."""

    worker: str


class DrainAnswer(msgspec.Struct, frozen=True):
    """`num_migrated` streams go on elsewhere; `in_flight` requests were still with the engine when it was asked."""

    worker: str
    draining: bool
    in_flight: int
    num_migrated: int


class MoveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /inference/v1/migrate` at a router: move a client's request, to the engine `to` if that is given."""

    request_id: str
    to: str | None = None


class Migration:
    """`runs` gives every open run with its client's request id."""

    def __init__(self, fleet: Fleet, runs: Callable[[], Iterable[tuple[str, Run]]], fallbacks: Fallbacks) -> None:
        self._fleet = fleet
        self._runs = runs
        self._fallbacks = fallbacks

    async def drain(self, name: str) -> DrainAnswer:
        """Give an engine no more work, and move what it decodes to others. What has nowhere to go ends where it is."""
        worker = self._worker(name, "worker")
        worker.is_draining = True
        in_flight = worker.in_flight
        log.info("engine %s drains, %d requests to go", worker.name, in_flight)
        return DrainAnswer(worker.name, True, in_flight, await self.move_from(worker))

    async def move_from(self, worker: Worker) -> int:
        """Move what an engine decodes to others; returns how many streams that are."""
        return await self._move(self._leaving(worker))

    async def go_on(self) -> None:
        """Move what reached a draining engine after it was asked."""
        for worker in [worker for worker in self._fleet.workers.values() if worker.rests and worker.in_flight]:
            try:
                await self.move_from(worker)
            except FourhopError as error:
                self._fallbacks.note("not_moved", f"{worker.name} keeps its streams: {error.message}")

    async def undrain(self, name: str) -> DrainAnswer:
        worker = self._worker(name, "worker")
        if worker.is_leaving:
            raise ClientError(f"{worker.name} is leaving this router; it stays if it joins again", param="worker")
        worker.is_draining = False
        return DrainAnswer(worker.name, False, worker.in_flight, 0)

    async def move(self, request: MoveRequest) -> MigrateAnswer:
        """Have one request go on elsewhere. Raises NotFound if no such request is being decoded."""
        wanted = None if request.to is None else self._worker(request.to, "to")
        if wanted is not None and not wanted.is_usable:
            raise ClientError(f"{wanted.name} takes no requests: {wanted.idle_reason}", param="to")
        client_id = request.request_id.removeprefix(ID_PREFIX)
        moving = [run for other_id, run in self._runs() if other_id == client_id and _is_decoding(run)]
        if not moving:
            raise NotFound("no request of this id is being decoded", param="request_id")
        for run in moving:
            run.wanted = None if wanted is None else wanted.name
        return MigrateAnswer(await self._move(moving))

    async def _move(self, runs: list[Run]) -> int:
        workers: dict[str, Worker] = {}
        legs: dict[str, list[str]] = defaultdict(list)
        for run in runs:
            assert run.leg is not None
            workers[run.leg.worker.name] = run.leg.worker
            legs[run.leg.worker.name].append(run.leg.request.request_id)
        return sum([await self._migrate_at(workers[name], ids) for name, ids in legs.items()])

    async def _migrate_at(self, worker: Worker, leg_ids: list[str]) -> int:
        """How many streams the engine ends; none by an engine that cannot, where they end in their own time."""
        try:
            return await worker.control.migrate(leg_ids)
        except PeerRefused as error:
            if error.status != 404:
                raise
            self._fallbacks.note("not_moved", f"{worker.name} cannot move its streams")
            return 0

    def _leaving(self, worker: Worker) -> list[Run]:
        """What an engine decodes and another could go on with."""
        if not self._fleet.candidates():
            return []
        return [
            run for _, run in self._runs() if _is_decoding(run) and run.leg is not None and run.leg.worker is worker
        ]

    def _worker(self, name: str, param: str) -> Worker:
        worker = self._fleet.workers.get(name)
        if worker is None:
            raise NotFound(f"this router has no engine {name[:200]}", param=param)
        return worker


def _is_decoding(run: Run) -> bool:
    """True if there is something to move: a prompt that is being computed is done sooner than it is moved."""
    return run.leg is not None and run.leg.is_open and run.leg.kind != "prefill" and bool(run.delivered)


def migration_routes(migration: Migration) -> list[Route]:
    async def drain(request: Request) -> Response:
        return json_response(await migration.drain((await read_body(request, DrainRequest)).worker))

    async def undrain(request: Request) -> Response:
        return json_response(await migration.undrain((await read_body(request, DrainRequest)).worker))

    async def move(request: Request) -> Response:
        return json_response(await migration.move(await read_body(request, MoveRequest)))

    return [
        Route(DRAIN_PATH, drain, methods=["POST"]),
        Route(UNDRAIN_PATH, undrain, methods=["POST"]),
        Route(MIGRATE_PATH, move, methods=["POST"]),
    ]
