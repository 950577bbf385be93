"""Engines from the idlest to the busiest, kept in order, so that a choice among a thousand looks at a few."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

Kind = tuple[str, str | None]
"""A role, and what two engines must have in common to hand KV over."""

Entry = tuple[int, int, str]
"""Requests with an engine, requests that it was ever given, its name."""

SHORT = 3
"""Engines of a kind that a choice looks at."""


class Ranks:
    """All engines, by kind. An entry is moved whenever its engine gets or ends a request."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, list[Entry]] = {}
        self._at: dict[str, tuple[Kind, Entry]] = {}

    def put(self, name: str, kind: Kind, load: int, num_placed: int) -> None:
        """Give an engine its place, a new one if it had one."""
        entry = (load, num_placed, name)
        known = self._at.get(name)
        if known is not None:
            old_kind, old = known
            if old == entry and old_kind == kind:
                return
            entries = self._kinds[old_kind]
            del entries[bisect_left(entries, old)]
        insort(self._kinds.setdefault(kind, []), entry)
        self._at[name] = kind, entry

    def drop(self, name: str) -> None:
        """The engine is gone."""
        known = self._at.pop(name, None)
        if known is not None:
            kind, entry = known
            entries = self._kinds[kind]
            del entries[bisect_left(entries, entry)]
            if not entries:
                del self._kinds[kind]

    def least(self, is_usable: Callable[[str], bool]) -> list[str]:
        """Of each kind the few with the least to do that can be used."""
        names: list[str] = []
        for entries in self._kinds.values():
            num_found = 0
            for _, _, name in entries:
                if is_usable(name):
                    names.append(name)
                    num_found += 1
                    if num_found == SHORT:
                        break
        return names
