"""Looking up the addresses of a name, by the system's resolver, so that one that hangs holds up nothing else.

The event loop's own way is a few threads that its end, and so a stop, waits for; and that all lookups share.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

Found = Sequence[tuple[Any, ...]]
"""What `getaddrinfo` answers."""

LookUp = Callable[[str, int], Awaitable[Found]]
"""`getaddrinfo` of a host and a port. Raises OSError, or ValueError for what cannot be a name."""


class Names:
    """Looks names up, each in a thread that nobody waits for; who asks meanwhile for the same waits for the same."""

    def __init__(self, ask: Callable[..., Found] = socket.getaddrinfo) -> None:
        self._ask = ask
        self._pending: dict[tuple[str, int], asyncio.Future[Found | Exception]] = {}

    async def look_up(self, host: str, port: int) -> Found:
        """All addresses of a host. The resolver's own timeouts bound it, or the caller's."""
        pending = self._pending.get((host, port))
        if pending is None:
            loop = asyncio.get_running_loop()
            pending = self._pending[host, port] = loop.create_future()
            Thread(target=self._run, args=(loop, host, port), name=f"look up {host}", daemon=True).start()
        found = await asyncio.shield(pending)
        if isinstance(found, Exception):
            raise found
        return found

    def _run(self, loop: asyncio.AbstractEventLoop, host: str, port: int) -> None:
        found: Found | Exception
        try:
            found = self._ask(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            found = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._settle, (host, port), found)

    def _settle(self, asked: tuple[str, int], found: Found | Exception) -> None:
        pending = self._pending.pop(asked)
        if not pending.done():
            pending.set_result(found)


async def hosts_of(host: str, port: int, look_up: LookUp) -> list[str]:
    """The addresses at which a host can be tried, in order; an address is its own. Raises as `LookUp` does."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, host)
            return [host]
    return list(dict.fromkeys(entry[4][0] for entry in await look_up(host, port)))
