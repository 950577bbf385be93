"""Answering: JSON, errors in OpenAI's shape, streams of server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from fourhop.service.tasks import Aside
from fourhop.wire import sse
from fourhop.wire.errors import EngineError, FourhopError, Unavailable, error_headers, error_response

T = TypeVar("T")

Gone = Callable[[Receive], Coroutine[Any, None, None]]
"""Returns when the client is gone."""

log = logging.getLogger(__name__)

INTERNAL_ERROR = EngineError("internal error; the server's log has the details")
EVENT_HEADERS = ((b"content-type", f"{sse.CONTENT_TYPE}; charset=utf-8".encode()), (b"cache-control", b"no-cache"))
SHUTTING_DOWN = Unavailable("the server is shutting down")


def json_response(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_answer(error: FourhopError) -> Response:
    return json_response(error_response(error), status=error.status, headers=error_headers(error))


async def stream_response(
    events: AsyncIterator[bytes],
    *,
    headers: Callable[[], dict[str, str]] | None = None,
    failure: Callable[[FourhopError], bytes] | None = None,
    gone: Gone | None = None,
) -> Response:
    """An answer made of ready server-sent events; it owns `events` and closes it, also when the client goes away.

    Nothing is sent before the first event is there, so an error up to then is an ordinary error response, and
    `headers` is asked only then. A later error becomes an error event followed by `[DONE]`, or what `failure` makes
    of it. `gone` returns when the client is gone; events that read the request's body as it comes need one that does
    not read it too.
    """
    return _EventStream(events, headers or dict, failure or _error_events, gone or until_gone)


async def until_disconnect(request: Request, awaitable: Awaitable[T]) -> T:
    """The awaitable's result. If the client goes away first it is cancelled and ClientDisconnect is raised.

    The body must have been read: what arrives afterwards on the connection can only be its end.
    """
    return await _unless_gone(until_gone(request.receive), awaitable)


class _EventStream(Response):
    def __init__(
        self,
        events: AsyncIterator[bytes],
        headers: Callable[[], dict[str, str]],
        failure: Callable[[FourhopError], bytes],
        gone: Gone,
    ) -> None:
        super().__init__()
        self._events = events
        self._late_headers = headers
        self._failure = failure
        self._gone = gone

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        self.raw_headers = [*EVENT_HEADERS]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _unless_gone(self._gone(receive), self._pump(send))

    async def _pump(self, send: Send) -> None:
        try:
            first = await anext(self._events, None)
            late = [(name.lower().encode(), value.encode("latin-1")) for name, value in self._late_headers().items()]
            self.raw_headers += late
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            last = await self._send_events(send, first)
            await send(_body(last, more=False))
        finally:
            await _close(self._events)

    async def _send_events(self, send: Send, event: bytes | None) -> bytes:
        """Send this event and those after it; returns what is to be sent last: the one that says it is the end, and the
        error that cut the stream off.
        """
        last = b""
        try:
            while event is not None:
                if last or event.endswith(sse.DONE_EVENT):
                    last += event
                else:
                    await send(_body(event))
                event = await anext(self._events, None)
            return last
        except FourhopError as error:
            return last + self._failure(error)
        except asyncio.CancelledError:
            await send(_body(last + self._failure(SHUTTING_DOWN), more=False))
            raise
        except Exception:  # the edge of the process: whatever it was, this stream ends with an error
            log.exception("a stream failed")
            return last + self._failure(INTERNAL_ERROR)


def _body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _error_events(error: FourhopError) -> bytes:
    return sse.encode_event(msgspec.json.encode(error_response(error))) + sse.DONE_EVENT


async def _close(iterator: AsyncIterator[bytes]) -> None:
    aclose = getattr(iterator, "aclose", None)
    if aclose is not None:
        await aclose()


async def _unless_gone(leaving: Coroutine[Any, None, None], work: Awaitable[T]) -> T:
    """Do the work in this task, and cancel it when the client goes away: then ClientDisconnect is raised."""
    task, is_gone = asyncio.current_task(), False
    assert task is not None

    def cancel_work() -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    watch = Aside(leaving, cancel_work)
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise ClientDisconnect from watch.failure
        raise
    finally:
        watch.close()  # before anything else can run: this task is never cancelled after its work


async def until_gone(receive: Receive) -> None:
    """Returns when the client is gone. Reads everything that comes from it until then."""
    while (await receive())["type"] != "http.disconnect":
        pass
