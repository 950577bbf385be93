"""A lean HTTP/1.1 client: one connection, one exchange at a time; `tokens.connection` makes calls of it.

It does what calls between our tiers need and no more: no redirects, cookies, proxies or compression. Measured against
aiohttp (one streamed answer of 17 events): a third of the processor time, which is what a router spends most of its on.
"""

from __future__ import annotations

import asyncio
from typing import cast

import httptools

HIGH_WATER_BYTES = 1 << 20
"""Unread bytes of an answer beyond which the peer is made to wait."""

LAST_INFORMATIONAL = 199


class Connection(asyncio.Protocol):
    """A connection and the answer that is arriving on it.

    Attributes:
        path: Of the current request.
        status: Of the answer, once `head` has returned.
        headers: Of the answer, with names in lower case.
        is_complete: The whole answer has arrived; there may be bytes left to `read`.
        is_untouched: No byte of an answer to the current request has arrived.
    """

    path: bytes
    status: int
    headers: dict[str, str]
    is_complete: bool
    is_untouched: bool

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._lost: Exception | None = None
        self._was_asked = False
        self._paused = False
        self.path = b""
        self._begin()

    @property
    def is_reusable(self) -> bool:
        """The answer is whole, its connection stays open and nothing else is on it."""
        is_open = self._lost is None and not self._transport.is_closing()
        return is_open and self.is_complete and self._keeps_alive and not self._paused

    @property
    def is_awaited(self) -> bool:
        """Somebody waits for the peer's next bytes."""
        return self._waiter is not None

    def send(self, request: bytes) -> None:
        """Begin an exchange."""
        self.path = request[request.index(b" ") + 1 : request.index(b" HTTP/")]
        self._was_asked = True
        self._begin()
        self._transport.write(request)

    async def head(self, timeout_s: float) -> None:
        """Wait for status and headers. Raises TimeoutError, or ConnectionError if they will not come."""
        while not self._has_head:
            if self._lost is not None:
                raise self._lost
            await self._wait(timeout_s)

    async def read(self, timeout_s: float) -> bytes:
        """What has arrived of the body, at least one byte; nothing at its end. Raises as `head` does."""
        while not self._body:
            if self.is_complete:
                return b""
            if self._lost is not None:
                raise self._lost
            await self._wait(timeout_s)
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._num_unread = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    def close(self) -> None:
        self._transport.close()

    def cut(self) -> None:
        """Wait no longer: who waits, and who comes later, gets a TimeoutError."""
        self._lose(TimeoutError())
        self._wake()

    def _begin(self) -> None:
        self._body: list[bytes] = []
        self.on_body = self._body.append  # called for every token of every stream
        self._parser = httptools.HttpResponseParser(self)
        self._num_unread = 0
        self._has_head = False
        self._keeps_alive = False
        self._ends_with_connection = False
        self.status = 0
        self.headers = {}
        self.is_complete = False
        self.is_untouched = True

    async def _wait(self, timeout_s: float) -> None:
        """Until something changes. One timer and one future: this runs for every token of every stream."""
        self._waiter = waiter = self._loop.create_future()
        timer = self._loop.call_later(timeout_s, _expire, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.is_untouched = False
        if self.is_complete or not self._was_asked:
            self._lose(ConnectionError("bytes that belong to no answer"))
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lose(ConnectionError(f"not HTTP: {error}"))
        self._num_unread += len(data)
        if self._num_unread > HIGH_WATER_BYTES and self._body and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self._has_head and self._ends_with_connection and error is None:
            self.is_complete = True
        if self._lost is None:
            self._lost = ConnectionResetError("the connection was closed")
        self._wake()

    def _lose(self, error: Exception) -> None:
        self._lost = error
        self._transport.abort()

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status <= LAST_INFORMATIONAL:
            return
        self._has_head = True
        self._keeps_alive = self._parser.should_keep_alive()
        self._ends_with_connection = not {"content-length", "transfer-encoding"} & self.headers.keys()

    def on_message_complete(self) -> None:
        if self._has_head:
            self.is_complete = True
        else:
            self.headers = {}


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())
