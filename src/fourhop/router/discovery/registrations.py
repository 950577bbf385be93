"""Engines that say themselves that they are there, and say it again while they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fourhop.router.discovery.source import Engines
from fourhop.router.policy import EngineRole

NUM_MISSED = 3
"""Intervals without a word after which an engine is taken to be gone."""


@dataclass(frozen=True)
class Registration:
    """`until_s` is on the router's own clock; None: until it is taken back."""

    role: EngineRole
    until_s: float | None


@dataclass
class Registrations:
    """What engines said, in this router's memory only: one that is started anew hears it again within an interval."""

    clock: Callable[[], float]
    name: str = "joined"
    interval_s: float = 1.0
    _known: dict[str, Registration] = field(default_factory=dict)

    @property
    def engines(self) -> Engines:
        return {url: known.role for url, known in self._known.items()}

    def put(self, url: str, role: EngineRole, every_s: float | None) -> None:
        """An engine is there, and will say so again in `every_s` seconds; None: once is enough."""
        until_s = None if every_s is None else self.clock() + NUM_MISSED * every_s
        self._known[url] = Registration(role, until_s)

    def remove(self, url: str) -> bool:
        """An engine leaves. False if it was not there."""
        return self._known.pop(url, None) is not None

    async def look(self) -> None:
        """Forget those that were silent for too long."""
        now_s = self.clock()
        self._known = {
            url: known for url, known in self._known.items() if known.until_s is None or known.until_s > now_s
        }
