"""Engines behind a name: every address that it resolves to is one, as with a headless service."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from fourhop.router.discovery.source import Engines, SourceError, check_engine_url, role_and_rest
from fourhop.router.policy import EngineRole
from fourhop.tokens.names import Found, LookUp, Names
from fourhop.wire.errors import StartError

FORM = "HOST:PORT"


@dataclass(frozen=True)
class Name:
    """A name whose addresses are engines of one role."""

    role: EngineRole
    host: str
    port: int


def parse_name(text: str) -> Name:
    """`prefill=HOST:PORT`. Raises StartError."""
    role, where = role_and_rest(text, "--engines-dns", FORM)
    check_engine_url(f"http://{where}")
    parts = urlsplit(f"http://{where}")
    if parts.port is None or parts.path or not parts.hostname:
        raise StartError(f"--engines-dns {text[:200]}: must be {role}={FORM}")
    return Name(role, parts.hostname, parts.port)


@dataclass
class DNSSource:
    """The addresses of a name. A name without any is a failure: DNS does not tell an empty service from a wrong one."""

    wanted: Name
    interval_s: float
    look_up: LookUp = field(default_factory=lambda: Names().look_up)
    engines: Engines = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"dns {self.wanted.role}={self.wanted.host}:{self.wanted.port}"

    async def look(self) -> None:
        try:
            found = await self.look_up(self.wanted.host, self.wanted.port)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise SourceError(f"cannot resolve {self.wanted.host}: {reason or error}") from None
        urls = urls_of(found)
        if not urls:
            raise SourceError(f"{self.wanted.host} has no address")
        self.engines = dict.fromkeys(urls, self.wanted.role)


def urls_of(found: Found) -> list[str]:
    """The URLs of what `getaddrinfo` found, each once, in order.

    Where there are addresses of both kinds only IPv4 counts: they are the same engines twice.
    """
    families = {entry[0] for entry in found}
    wanted = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    places = {(entry[4][0], entry[4][1]) for entry in found if entry[0] == wanted}
    return [f"http://{f'[{host}]' if ':' in host else host}:{port}" for host, port in sorted(places)]
