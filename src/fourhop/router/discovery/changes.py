"""What follows for the fleet from which engines are wanted. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fourhop.router.discovery.source import Engines
from fourhop.router.ledger import Hold
from fourhop.router.policy import EngineRole
from fourhop.router.worker import Worker


@dataclass
class Changes:
    """Engines that are to join, with their roles; those that leave; those that were leaving and stay."""

    joins: dict[str, EngineRole] = field(default_factory=dict)
    leaves: list[str] = field(default_factory=list)
    stays: list[str] = field(default_factory=list)


def changes(wanted: Engines, there: Iterable[Worker]) -> Changes:
    """From the engines that are there to those that are wanted.

    One that is wanted in another role leaves first: it joins anew when it is gone.
    """
    found, known = Changes(), set[str]()
    for worker in there:
        known.add(worker.name)
        is_wanted = wanted.get(worker.name) == worker.role
        if is_wanted and worker.is_leaving:
            found.stays.append(worker.name)
        elif not is_wanted and not worker.is_leaving:
            found.leaves.append(worker.name)
    found.joins = {url: role for url, role in wanted.items() if url not in known}
    return found


def is_gone(worker: Worker, holds: Sequence[Hold], now_s: float) -> bool:
    """True when nothing refers to an engine that leaves: no request is with it, and it owes no hold.

    One that is down cannot be told to give a hold back, nor be read from: its holds end with their leases. `now_s` is
    seconds since the epoch, as leases are.
    """
    if worker.in_flight:
        return False
    return not holds or (worker.down is not None and all(hold.expires_at_s <= now_s for hold in holds))


def differing(answers: Mapping[str, Engines]) -> dict[str, list[str]]:
    """Engines to which sources give different roles, with the names of those sources, the one that is right first."""
    roles: dict[str, dict[str, EngineRole]] = {}
    for name, engines in answers.items():
        for url, role in engines.items():
            roles.setdefault(url, {})[name] = role
    return {url: list(given) for url, given in roles.items() if len(set(given.values())) > 1}
