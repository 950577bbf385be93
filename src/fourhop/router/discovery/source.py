"""What a way to find engines is: a `Source`. What several of them say together is their union. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from fourhop.router.policy import EngineRole
from fourhop.tokens.address import check_url
from fourhop.wire.errors import StartError

Engines = Mapping[str, EngineRole]
"""Engines by URL."""

ROLES: tuple[EngineRole, ...] = ("prefill", "decode")


class SourceError(Exception):
    """A source did not say which engines there are; one line."""


class Source(Protocol):
    """Names engines. What it named last stands until it names others: a source that fails empties no fleet.

    Contract, held by `tests/contracts/source.py`: `look` asks anew, within bounded time and without blocking the event
    loop, and afterwards `engines` is the answer, or SourceError is raised and `engines` is as it was. Before the first
    look `engines` is what is known without asking.
    """

    @property
    def name(self) -> str:
        """For logs and a metric's label, such as `file`."""

    @property
    def interval_s(self) -> float:
        """Time from one look to the next."""

    @property
    def engines(self) -> Engines: ...

    async def look(self) -> None: ...


def union(answers: Iterable[Engines]) -> dict[str, EngineRole]:
    """All engines that are named. Where two sources give one engine different roles, the first is right."""
    engines: dict[str, EngineRole] = {}
    for answer in answers:
        engines = {**engines, **{url: role for url, role in answer.items() if url not in engines}}
    return engines


def engines_of(prefill: Iterable[str], decode: Iterable[str]) -> dict[str, EngineRole]:
    """Engines from lists of URLs. Raises StartError for what is no URL, and for an engine that is listed twice."""
    sides: tuple[tuple[EngineRole, Iterable[str]], ...] = (("prefill", prefill), ("decode", decode))
    engines: dict[str, EngineRole] = {}
    seen: set[str] = set()
    for role, urls in sides:
        for url in urls:
            check_engine_url(url)
            if url.rstrip("/") in seen:
                raise StartError(f"an engine can have one role only: {url} is listed twice")
            seen.add(url.rstrip("/"))
            engines[url] = role
    return engines


def check_engine_url(url: str) -> None:
    """Raises StartError for what cannot be the URL of an engine."""
    try:
        check_url(url)
    except ValueError:
        raise StartError(f"not the URL of an engine: {url[:200]}") from None


def role_and_rest(text: str, flag: str, form: str) -> tuple[EngineRole, str]:
    """What a flag like `prefill=…` says. Raises StartError, which shows the form that is wanted."""
    role, _, rest = text.partition("=")
    for known in ROLES:
        if role == known and rest:
            return known, rest
    raise StartError(f"{flag} {text[:200]}: must be prefill={form} or decode={form}")
