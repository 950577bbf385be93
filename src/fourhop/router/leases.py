"""Leases: kept alive while the router wants them, and compared with what the engines say they keep."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable

import msgspec

from fourhop.router.fleet import Fleet
from fourhop.router.ledger import Hold, HoldState, Ledger
from fourhop.router.release import Releaser
from fourhop.router.worker import Worker
from fourhop.wire.errors import FourhopError, PeerRefused
from fourhop.wire.worker import Leases

log = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews what this router holds, and releases what an engine holds for it and nobody here knows of.

    Leases of other routers, whose request ids do not begin with `prefix`, are left alone.
    """

    def __init__(
        self, fleet: Fleet, ledger: Ledger, releaser: Releaser, *, prefix: str, wall_clock: Callable[[], float]
    ) -> None:
        self.num_strays = 0
        self._fleet = fleet
        self._ledger = ledger
        self._releaser = releaser
        self._prefix = prefix
        self._wall_clock = wall_clock

    async def renew(self) -> None:
        """Renew the leases that are due, everywhere at once: an engine that hangs keeps no other from its turn.

        What its engine does not know any more is over.
        """
        due: dict[str, list[Hold]] = defaultdict(list)
        for hold in self._ledger.due(self._wall_clock()):
            due[hold.engine].append(hold)
        workers = {engine: self._fleet.find(engine) for engine in due}
        await asyncio.gather(
            *(self._renew_at(worker, due[engine]) for engine, worker in workers.items() if worker is not None)
        )

    async def _renew_at(self, worker: Worker, holds: list[Hold]) -> None:
        try:
            tickets = await worker.control.renew([hold.ticket_id for hold in holds if hold.ticket_id is not None])
        except FourhopError as error:
            log.warning("could not renew %d leases at %s: %s", len(holds), worker.name, error.message)
            return
        known = {ticket.ticket_id: ticket for ticket in tickets}
        for hold in holds:
            ticket = known.get(hold.ticket_id or "")
            if ticket is None:
                self._ledger.end(hold, HoldState.EXPIRED)
            else:
                self._ledger.renew(hold, msgspec.to_builtins(ticket), self._wall_clock())

    async def reconcile(self, worker: Worker) -> None:
        """The engine came up: forget what an earlier life of it held, release what nobody here wants."""
        if worker.info is not None:
            self._ledger.forget_old(worker.name, worker.epoch)
        self._releaser.retry(worker)
        listed = await self._listed(worker)
        if listed is None or listed.epoch != worker.epoch:
            return
        strays = [lease.ticket_id for lease in self._ledger.strays(listed, self._prefix)]
        if not strays:
            return
        self.num_strays += len(strays)
        log.warning("%s keeps %d holds of ours that nobody wants", worker.name, len(strays))
        try:
            await worker.control.abort(strays)
        except FourhopError as error:
            log.warning("could not release them: %s", error.message)

    async def _listed(self, worker: Worker) -> Leases | None:
        """The engine's leases; None from one that has none to tell of, like a stock vLLM."""
        if worker.info is None:
            return None
        try:
            return await worker.control.leases()
        except PeerRefused as error:
            if error.status != 404:
                log.warning("could not list the leases of %s: %s", worker.name, error.message)
        except FourhopError as error:
            log.warning("could not list the leases of %s: %s", worker.name, error.message)
        return None
