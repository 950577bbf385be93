"""Calls to a peer: pooled connections that are safe to reuse, and every way a call can fail as a FourhopError."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Container
from dataclasses import dataclass
from typing import Self

from fourhop.tokens.address import Origin, split_url
from fourhop.tokens.http import Connection
from fourhop.tokens.names import LookUp, Names, hosts_of
from fourhop.tokens.refusal import Entry, refusal_of
from fourhop.wire.errors import PeerError, PeerTimeout


@dataclass(frozen=True)
class Timeouts:
    """How long to wait for a peer, in seconds. Every wait is bounded.

    `first_byte_s` is from sending the request to the head of the answer; a server that commits to a status only with
    its first token queues and prefills within it. `idle_s` is between any two reads after that.
    """

    connect_s: float = 3.0
    first_byte_s: float = 120.0
    idle_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("connect_s", "first_byte_s", "idle_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a positive number of seconds, not {getattr(self, name)}")


class Session:
    """The idle connections to all peers. Use it as an async context manager, inside the event loop that it is for.

    A connection is dropped after `pool_idle_s` without use, well before uvicorn's (and so vLLM's) five seconds, so that
    a request seldom meets a connection that the other end is closing; `call` handles the rest.
    """

    def __init__(self, pool_idle_s: float, tls: ssl.SSLContext | None, look_up: LookUp) -> None:
        self._pool_idle_s = pool_idle_s
        self._look_up = look_up
        self._idle: dict[Origin, list[tuple[float, Connection]]] = {}
        self._open: dict[Connection, Origin] = {}
        self._tls = tls

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._idle.clear()
        await asyncio.sleep(0)  # transports close in the loop's next turn

    def take_idle(self, origin: Origin) -> Connection | None:
        """The connection that was used last, if it can still be used."""
        idle = self._idle.get(origin)
        oldest_s = asyncio.get_running_loop().time() - self._pool_idle_s
        while idle:
            since_s, connection = idle.pop()
            if connection.is_reusable and since_s > oldest_s:
                return connection
            self._drop(connection)
        return None

    async def connect(self, origin: Origin, timeout_s: float) -> Connection:
        """A new connection, to the first address that takes one. Raises OSError, ValueError or TimeoutError."""
        failure = OSError("no address")
        async with asyncio.timeout(timeout_s):
            for host in await hosts_of(origin.host, origin.port, self._look_up):
                try:
                    connection = await self._connect(host, origin)
                except OSError as error:
                    failure = error
                    continue
                self._open[connection] = origin
                return connection
        raise failure

    async def _connect(self, host: str, origin: Origin) -> Connection:
        tls, name = (self._tls_context(), origin.host) if origin.is_secure else (None, None)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, host, origin.port, ssl=tls, server_hostname=name)
        return connection

    def give_back(self, origin: Origin, connection: Connection) -> None:
        """After an exchange: keep the connection if another can follow, else close it, which tells the peer to stop."""
        if not connection.is_reusable:
            self._drop(connection)
            return
        loop = asyncio.get_running_loop()
        idle = self._idle.setdefault(origin, [])
        if not idle:
            loop.call_later(self._pool_idle_s, self._sweep, origin)
        idle.append((loop.time(), connection))

    def cut(self, url: str) -> None:
        """Give a silent peer up: every call that waits for it ends in PeerTimeout at once.

        Another one at the same origin, below another path, is left alone.
        """
        for connection in self._below(url):
            connection.cut()

    def awaits(self, url: str) -> bool:
        """Whether a call at or below this URL waits for the peer's next bytes."""
        return any(connection.is_awaited for connection in self._below(url))

    def _below(self, url: str) -> list[Connection]:
        origin, path = split_url(url)
        below = f"{path.rstrip('/')}/".encode()
        return [one for one, where in self._open.items() if where == origin and (one.path + b"/").startswith(below)]

    def _sweep(self, origin: Origin) -> None:
        """Close what was idle for too long; comes again while there is something idle."""
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - self._pool_idle_s
        idle = self._idle.get(origin, [])
        for _, connection in [entry for entry in idle if entry[0] <= oldest_s]:
            self._drop(connection)
        idle[:] = [entry for entry in idle if entry[0] > oldest_s]
        if idle:
            loop.call_later(self._pool_idle_s, self._sweep, origin)

    def _drop(self, connection: Connection) -> None:
        connection.close()
        self._open.pop(connection, None)

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def open_session(
    *, pool_idle_s: float = 2.0, tls: ssl.SSLContext | None = None, look_up: LookUp | None = None
) -> Session:
    """The connections for calls to peers; `async with` closes them. `tls` says whom to trust, if not the usual ones."""
    return Session(pool_idle_s, tls, look_up or Names().look_up)


class Answer:
    """A peer's answer: its status and headers, and its body as it arrives."""

    def __init__(self, connection: Connection, origin: Origin, idle_s: float) -> None:
        self._connection = connection
        self._origin = origin
        self._idle_s = idle_s
        self.status = connection.status
        self.headers = connection.headers

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def is_complete(self) -> bool:
        return self._connection.is_complete

    async def read(self, timeout_s: float | None = None) -> bytes:
        """What has arrived, at least one byte; nothing at the end. Raises PeerTimeout or PeerError."""
        try:
            return await self._connection.read(self._idle_s if timeout_s is None else timeout_s)
        except (OSError, TimeoutError) as error:
            raise _peer_error(error, self._origin) from error

    async def read_all(self, limit: int | None = None) -> bytes:
        """The body up to its end, or its first `limit` bytes and what came with them."""
        body = bytearray()
        while (limit is None or len(body) < limit) and (data := await self.read()):
            body += data
        return bytes(body)


def call(
    session: Session,
    method: str,
    url: str,
    *,
    timeouts: Timeouts,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    accepted: Container[int] = (200,),
    entry: Entry | None = None,
) -> Call:
    """A context: the answer to a request, its status and headers read; one of another than an accepted status raises.

    A connection that breaks before any byte of the answer, and that had been used before, was closed by the peer
    while it was idle: the request is sent once more, on a new connection. An answer that was not read to its end
    closes its connection, which tells the peer to stop.

    Raises PeerRefused with the peer's own error, PeerTimeout, or PeerError; with `entry` KeyRefused for our key.
    """
    origin, path = split_url(url)
    return Call(session, origin, _request(method, origin, path, headers or {}, body), timeouts, accepted, entry)


@dataclass
class Call:
    """See `call`. A class of its own: a generator's context costs a router several microseconds for each leg."""

    session: Session
    origin: Origin
    request: bytes
    timeouts: Timeouts
    accepted: Container[int]
    entry: Entry | None = None
    _connection: Connection | None = None

    async def __aenter__(self) -> Answer:
        self._connection = await _exchange(self.session, self.origin, self.request, self.timeouts)
        try:
            answer = Answer(self._connection, self.origin, self.timeouts.idle_s)
            if answer.status not in self.accepted:
                refusal = await refusal_of(answer, self.origin)
                raise refusal if self.entry is None else self.entry.told(refusal)
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise PeerError(f"{self.origin} sent an encoding that was not asked for")
        except BaseException:
            self.session.give_back(self.origin, self._connection)
            raise
        return answer

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._connection is not None
        self.session.give_back(self.origin, self._connection)


async def _exchange(session: Session, origin: Origin, request: bytes, timeouts: Timeouts) -> Connection:
    """A connection on which the head of the answer has arrived."""
    idle = session.take_idle(origin)
    if idle is not None:
        try:
            return await _answered(session, origin, idle, request, timeouts)
        except ConnectionError as error:
            if not idle.is_untouched:
                raise _peer_error(error, origin) from error
        except TimeoutError as error:
            raise _peer_error(error, origin) from error
    try:
        fresh = await session.connect(origin, timeouts.connect_s)
    except TimeoutError as error:
        raise PeerTimeout(f"timed out waiting to connect to {origin}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise PeerError(f"cannot connect to {origin}: {reason or 'no address'}") from error
    try:
        return await _answered(session, origin, fresh, request, timeouts)
    except (OSError, TimeoutError) as error:
        raise _peer_error(error, origin) from error


async def _answered(
    session: Session, origin: Origin, connection: Connection, request: bytes, timeouts: Timeouts
) -> Connection:
    """Send the request and wait for the head of its answer. A connection that gives none is closed."""
    has_head = False
    try:
        connection.send(request)
        await connection.head(timeouts.first_byte_s)
        has_head = True
        return connection
    finally:
        if not has_head:
            session.give_back(origin, connection)


def _request(method: str, origin: Origin, path: str, headers: dict[str, str], body: bytes) -> bytes:
    fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if fields.count("\n") != len(headers) or fields.count("\r") != len(headers):
        raise ValueError("a header holds a line break")
    start = f"{method} {path} HTTP/1.1\r\nHost: {origin.host}:{origin.port}\r\n"
    framing = f"Accept-Encoding: identity\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"{start}{fields}{framing}".encode("latin-1") + body


def request_headers(api_key: str | None) -> dict[str, str]:
    """The headers of every call that carries JSON."""
    headers = {"Content-Type": "application/json"}
    return headers if api_key is None else headers | {"Authorization": f"Bearer {api_key}"}


def _peer_error(error: Exception, origin: Origin) -> PeerError:
    """What went wrong between us and the peer, named by its origin."""
    if isinstance(error, TimeoutError):
        return PeerTimeout(f"timed out waiting to hear from {origin}")
    return PeerError(f"the connection to {origin} broke")
