"""Giving back what was held: every hold that a request leaves behind is released at its engine."""

from __future__ import annotations

import asyncio
import logging

from fourhop.router.fleet import Fleet
from fourhop.router.ledger import Hold, HoldState, Ledger
from fourhop.router.worker import Worker
from fourhop.wire.errors import FourhopError

log = logging.getLogger(__name__)


class Releaser:
    """Tells engines that nobody will come for their blocks, in tasks of its own: a cancelled request cannot stop it.

    Every release takes one bounded call. One that fails leaks its hold until another succeeds (`retry`) or the lease
    ends.
    """

    def __init__(self, fleet: Fleet, ledger: Ledger) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._tasks: set[asyncio.Task[None]] = set()

    def leave(self, hold: Hold | None) -> None:
        """Nobody wants this hold any more: release it if it is still owed, and can be. Returns at once."""
        if hold is not None and hold.is_owed and not hold.is_left:
            hold.is_left = True
            if hold.can_be_released:
                self._spawn(hold)

    def retry(self, worker: Worker) -> None:
        """The engine is up: release what it could not be told about."""
        for hold in self._ledger.at(worker.name):
            if hold.is_leaked:
                hold.is_leaked = False
                self._spawn(hold)

    def retry_leaks(self) -> None:
        """Try again wherever an engine is up: one can fail a release and be well otherwise."""
        for worker in self._fleet.workers.values():
            if worker.down is None:
                self.retry(worker)

    async def close(self) -> None:
        """Wait for the releases that are on their way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, hold: Hold) -> None:
        task = asyncio.create_task(self._release(hold))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, hold: Hold) -> None:
        try:
            if not await self._tell(hold):
                return
        except FourhopError as error:
            hold.is_leaked = hold.is_owed
            log.warning("could not release %s at %s: %s", hold.ids[0], hold.engine, error.message)
        else:
            hold.is_leaked = False
            self._ledger.end(hold, HoldState.RELEASED)

    async def _tell(self, hold: Hold) -> bool:
        """Whether there was somebody to tell: the engine that holds, or one that may refuse what it holds."""
        source = self._fleet.find(hold.engine)
        if source is None:
            return False
        if not hold.only_expires:
            await source.control.abort(hold.ids)
            return True
        peers = [
            one for one in self._fleet.workers.values() if one.role == "decode" and one.exchange == source.exchange
        ]
        peer = next((one for one in peers if one.down is None and one is not source), None)
        if peer is None or hold.ticket is None:
            return False
        await peer.control.refuse(hold.ticket)
        return True
