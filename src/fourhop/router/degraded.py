"""What the router has to do without for the time being, while it goes on serving."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from fourhop.router.caches import Caches
from fourhop.router.fleet import Fleet
from fourhop.router.ledger import Ledger
from fourhop.router.policy import Reason
from fourhop.service.logs import event

log = logging.getLogger(__name__)

CAUSES = ("no_prefill", "no_decode", "no_pair", "engine_down", "events_unheard", "leaked_holds")
"""No engine of a side that the fleet has gets requests; none of one side can hand over to one of the other; some engine
is down; an engine's cache events cannot be heard; blocks are held for nobody, and their release failed.
"""

MISSING_SIDE = frozenset({Reason.NO_PREFILL, Reason.NO_DECODE, Reason.NO_PAIR})


def is_fallback(reason: Reason, fleet: Fleet) -> bool:
    """Whether a request was placed whole because one side is gone; a fleet of one side alone has nothing to miss."""
    return reason in MISSING_SIDE and 0 < fleet.num_prefill < len(fleet.workers)


@dataclass
class Degraded:
    """Which causes there are, and since when. Somebody has to `look` now and then."""

    fleet: Fleet
    caches: Caches
    ledger: Ledger
    clock: Callable[[], float]
    _since_s: dict[str, float] = field(default_factory=dict)

    def look(self) -> None:
        now_s, causes = self.clock(), self._causes()
        for cause in CAUSES:
            if cause in causes and cause not in self._since_s:
                self._since_s[cause] = now_s
                log.warning(event("degraded", cause=cause))
            elif cause not in causes and cause in self._since_s:
                log.warning(event("recovered", cause=cause, after_s=now_s - self._since_s.pop(cause)))

    def lasting(self) -> dict[str, float]:
        """How long each cause has been there, in seconds."""
        self.look()
        now_s = self.clock()
        return {cause: now_s - since_s for cause, since_s in self._since_s.items()}

    def _causes(self) -> set[str]:
        workers = list(self.fleet.workers.values())
        usable = [worker for worker in workers if worker.is_usable]
        exchanges = {
            role: {worker.exchange for worker in usable if worker.role == role} for role in ("prefill", "decode")
        }
        has_sides = all(exchanges.values())
        found = {
            "no_prefill": not exchanges["prefill"] and self.fleet.num_prefill > 0,
            "no_decode": not exchanges["decode"] and self.fleet.num_prefill < len(workers),
            "no_pair": has_sides and not (exchanges["prefill"] & exchanges["decode"]) - {None},
            "engine_down": any(worker.down is not None and not worker.is_leaving for worker in workers),
            "events_unheard": bool(self.caches.unheard),
            "leaked_holds": self.ledger.num_leaked > 0,
        }
        return {cause for cause, is_so in found.items() if is_so}
