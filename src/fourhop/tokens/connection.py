"""HTTP to a peer: pooled connections that are safe to reuse, and every way a call can fail as a FourhopError."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Container, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import aiohttp

from fourhop.wire.errors import PeerError, PeerTimeout, error_from_body

MAX_ERROR_BYTES = 64 * 1024
READ_BUFFER_BYTES = 256 * 1024


@dataclass(frozen=True)
class Timeouts:
    """How long to wait for a peer, in seconds. Every wait is bounded.

    `first_byte_s` is from sending the request to the first bytes of the answer; a server that commits to a status
    only with its first token queues and prefills within it. `idle_s` is between any two reads after that.
    """

    connect_s: float = 3.0
    first_byte_s: float = 120.0
    idle_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("connect_s", "first_byte_s", "idle_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a positive number of seconds, not {getattr(self, name)}")


def open_session(*, pool_idle_s: float = 2.0) -> aiohttp.ClientSession:
    """A session for calls to peers, to be made inside the event loop and closed by its maker.

    Idle connections are dropped after `pool_idle_s`, well before uvicorn's (and so vLLM's) five seconds, so that a
    request seldom meets a connection that the other end is closing; `call` handles the rest.
    """
    return _session(aiohttp.TCPConnector(limit=0, keepalive_timeout=pool_idle_s))


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        connector=connector,
        trace_configs=[trace],
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=READ_BUFFER_BYTES,
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
    )


@dataclass
class _Attempt:
    reused: bool = False


async def _note_reuse(
    session: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    attempt = context.trace_request_ctx
    if isinstance(attempt, _Attempt):
        attempt.reused = True


@asynccontextmanager
async def call(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    timeouts: Timeouts,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
    accepted: Container[int] = (200,),
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer to a request, its status and headers read; an answer of another than an accepted status raises.

    A connection that breaks before any byte of the answer, and that had been used before, was closed by the peer
    while it was idle: the request is sent once more, on a new connection. An answer that was not read to its end
    closes its connection, which tells the peer to stop.

    Raises PeerRefused with the peer's own error, PeerTimeout, or PeerError.
    """
    attempt = _Attempt()
    async with AsyncExitStack() as stack:
        with peer_errors(url):
            try:
                response = await _send(session, method, url, timeouts, body, headers, attempt)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not attempt.reused:
                    raise
                fresh = await stack.enter_async_context(_session(aiohttp.TCPConnector(force_close=True)))
                response = await _send(fresh, method, url, timeouts, body, headers, _Attempt())
        stack.callback(response.close)
        if response.status not in accepted:
            with peer_errors(url):
                raise await _refusal(response, timeouts)
        yield response


async def _send(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    timeouts: Timeouts,
    body: bytes | None,
    headers: dict[str, str] | None,
    attempt: _Attempt,
) -> aiohttp.ClientResponse:
    async with asyncio.timeout(timeouts.first_byte_s):
        return await session.request(
            method,
            url,
            data=body,
            headers=headers,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s),
            trace_request_ctx=attempt,
        )


async def _refusal(response: aiohttp.ClientResponse, timeouts: Timeouts) -> PeerError:
    """The peer's error. A status that is no error was not asked for, so it is one all the same."""
    async with asyncio.timeout(timeouts.idle_s):
        body = await response.content.read(MAX_ERROR_BYTES)
        while len(body) < MAX_ERROR_BYTES and (more := await response.content.read(MAX_ERROR_BYTES - len(body))):
            body += more
    if response.status < 400:
        return PeerError(f"{response.url.origin()} answered with status {response.status}")
    return error_from_body(response.status, body, retry_after_s=_retry_after(response.headers.get("Retry-After", "")))


def _retry_after(value: str) -> float | None:
    """`Retry-After` in seconds; its date form is not used by any engine and is left out."""
    return float(value) if value.isascii() and value.isdecimal() and len(value) < 8 else None


def request_headers(api_key: str | None) -> dict[str, str]:
    """The headers of every call that carries JSON."""
    headers = {"Content-Type": "application/json"}
    return headers if api_key is None else headers | {"Authorization": f"Bearer {api_key}"}


@contextmanager
def peer_errors(url: str) -> Iterator[None]:
    """Whatever goes wrong between us and the peer, as a PeerError that names the peer by its origin."""
    origin = "/".join(url.split("/", 3)[:3])
    try:
        yield
    except TimeoutError as error:  # aiohttp's own time limits are TimeoutErrors too
        during = "connect to" if isinstance(error, aiohttp.ServerTimeoutError) else "hear from"
        raise PeerTimeout(f"timed out waiting to {during} {origin}") from error
    except aiohttp.ClientConnectorError as error:
        raise PeerError(f"cannot connect to {origin}: {error.os_error.strerror or 'no address'}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise PeerError(f"the connection to {origin} broke") from error
