"""The edge of every server: errors, keys, ids, bodies, streams and clients that leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fakes.asgi import Exchange, get, post
from fourhop import __version__
from fourhop.service import ServerConfig, create_app, json_response, read_body, request_id, stream_response
from fourhop.service import until_disconnect as run_until_disconnect
from fourhop.wire.errors import ClientError, EngineError, ErrorBody, PeerRefused, TransferError, Unavailable


class Inner(msgspec.Struct):
    count: int


class Body(msgspec.Struct):
    name: str
    items: list[Inner] = []


async def echo(request: Request) -> Response:
    body = await read_body(request, Body)
    return json_response({"name": body.name, "id": request_id(request)})


def app_with(
    *routes: Route, config: ServerConfig | None = None, registry: CollectorRegistry | None = None
) -> Starlette:
    return create_app(
        routes=[Route("/v1/echo", echo, methods=["POST"]), *routes],
        config=config or ServerConfig(),
        registry=registry or CollectorRegistry(),
    )


def ask(exchange: Exchange, app: Starlette | None = None) -> Exchange:
    return asyncio.run(exchange.run(app or app_with()))


def error_of(exchange: Exchange) -> ErrorBody:
    body = msgspec.json.decode(exchange.content, type=dict[str, ErrorBody])
    assert list(body) == ["error"]
    assert body["error"].code == exchange.status
    return body["error"]


def failing(error: Exception) -> Starlette:
    async def fail(request: Request) -> Response:
        raise error

    return app_with(Route("/fail", fail))


def test_a_json_body_is_read_and_answered() -> None:
    exchange = ask(post("/v1/echo", b'{"name": "\xf0\x9f\x91\x8b"}'))
    assert exchange.status == 200
    assert exchange.json() == {"name": "👋", "id": ""}
    assert exchange.answer_headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"{}", "name"),
        (b'{"name": 1}', "name"),
        (b'{"name": "a", "items": [{"count": 1}, {"count": "x"}]}', "items[1].count"),
        (b'{"name": "a", "items": [{}]}', "items[0].count"),
        (b'{"name": "a", "items": [{"count": ' + b"9" * 5000 + b"}]}", "items[0].count"),
        (b'{"name": "\\ud800"}', "name"),
        (b'{"name": "a\\udc00b"}', "name"),
        (b'{"name": "\xff"}', None),
        (b'{"name": NaN}', None),
        (b'{"name": "a", "extra": ' + b"[" * 100_000, None),
    ],
)
def test_a_bad_body_is_a_400_that_names_the_field(body: bytes, param: str | None) -> None:
    exchange = ask(post("/v1/echo", body))
    assert exchange.status == 400
    assert error_of(exchange).param == param
    assert error_of(exchange).type == "BadRequestError"


@given(st.binary(max_size=60))
def test_any_bytes_get_a_200_or_a_400(body: bytes) -> None:
    assert ask(post("/v1/echo", body)).status in (200, 400)


@given(st.text(st.characters(categories=("Cs", "Lu")), max_size=8))
def test_lone_surrogates_never_come_in(text: str) -> None:
    exchange = ask(
        post("/v1/echo", b'{"name": "' + "".join(f"\\u{ord(c):04x}" for c in text if ord(c) < 65536).encode() + b'"}')
    )
    assert exchange.status in (200, 400)
    if exchange.status == 200:
        exchange.content.decode()  # UTF-8 without surrogates


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_json_by_its_type_is_refused(content_type: str) -> None:
    exchange = ask(post("/v1/echo", b'{"name": "a"}', content_type=content_type))
    assert exchange.status == 400
    assert "application/json" in error_of(exchange).message


def test_a_compressed_body_is_refused() -> None:
    assert ask(post("/v1/echo", b"x", content_encoding="gzip")).status == 400


def test_a_large_body_is_refused_by_its_declared_and_by_its_real_size() -> None:
    app = app_with(config=ServerConfig(max_body_bytes=20))
    declared = post("/v1/echo", b"", content_length="21")
    counted = Exchange("POST", "/v1/echo", {"content-type": "application/json"}, [b"x" * 15, b"x" * 15])
    for exchange in (declared, counted):
        assert ask(exchange, app).status == 413
        assert error_of(exchange).type == "PayloadTooLargeError"
    assert ask(post("/v1/echo", b'{"name": "123456789"}'[:20], content_length="20"), app).status == 400


@pytest.mark.parametrize(
    ("error", "status", "type"),
    [
        (ClientError("bad", param="messages[0]"), 400, "BadRequestError"),
        (Unavailable("full", retry_after_s=2.4), 503, "ServiceUnavailableError"),
        (EngineError("broken"), 500, "InternalServerError"),
        (TransferError("epoch", "gone"), 500, "TransferError"),
        (PeerRefused(429, ErrorBody("slow down", "RateLimit", "n", 429)), 429, "RateLimit"),
    ],
)
def test_an_error_is_answered_with_its_status(error: Exception, status: int, type: str) -> None:
    exchange = ask(get("/fail"), failing(error))
    assert exchange.status == status
    assert error_of(exchange).type == type
    assert exchange.answer_headers.get("retry-after") == ("2" if status == 503 else None)


def test_an_unexpected_exception_is_logged_and_leaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    exchange = ask(get("/fail", x_request_id="r1"), failing(RuntimeError("secret prompt")))
    assert exchange.status == 500
    assert b"secret" not in exchange.content and b"RuntimeError" not in exchange.content
    assert exchange.answer_headers["x-request-id"] == "r1"
    assert error_of(exchange).type == "InternalServerError"
    assert "RuntimeError: secret prompt" in caplog.text


def test_an_unknown_path_and_a_wrong_method_have_the_same_error_shape() -> None:
    missing = ask(get("/v2/nothing"))
    assert (missing.status, error_of(missing).type) == (404, "NotFoundError")
    wrong = ask(get("/v1/echo"))
    assert (wrong.status, error_of(wrong).type) == (405, "MethodNotAllowedError")
    assert wrong.answer_headers["allow"] == "POST"
    assert ask(post("/v1/echo/", b"{}")).status == 404


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [("abc-1", "abc-1"), ("a b\tc", "abc"), ("ä\x7f", None), ("x" * 500, "x" * 128), ("", None)],
)
def test_the_request_id_is_cleaned_and_echoed(sent: str, echoed: str | None) -> None:
    exchange = ask(post("/v1/echo", b'{"name": "a"}', x_request_id=sent))
    assert exchange.answer_headers.get("x-request-id") == echoed
    assert exchange.json() == {"name": "a", "id": echoed or ""}


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("", 401),
        ("Bearer wrong", 401),
        ("Bearer ", 401),
        ("Basic k2", 401),
        ("Bearer k\xe9", 401),
        ("Bearer k1", 200),
        ("bearer k2", 200),
    ],
)
def test_keys_guard_the_api(authorization: str, status: int) -> None:
    app = app_with(config=ServerConfig(api_key=("k1", "k2")))
    exchange = ask(post("/v1/echo", b'{"name": "a"}', authorization=authorization), app)
    assert exchange.status == status
    if status == 401:
        assert error_of(exchange).type == "AuthenticationError"
        assert exchange.answer_headers["www-authenticate"] == "Bearer"
    assert ask(get("/version"), app).status == 200
    assert ask(get("/v1/nothing"), app).status == 401


def test_keys_do_not_show_in_the_config() -> None:
    assert "k1" not in repr(ServerConfig(api_key=("k1",)))


def test_version_and_metrics() -> None:
    registry = CollectorRegistry()
    Counter("fourhop_things", "Things", registry=registry).inc()
    app = app_with(registry=registry)
    assert ask(get("/version"), app).json() == {"version": __version__}
    metrics = ask(get("/metrics"), app)
    assert b"fourhop_things_total 1.0" in metrics.content
    assert metrics.answer_headers["content-type"].startswith("text/plain")


# Streams


class Stream:
    """A source of events that waits at each `None`, and remembers how it ended."""

    def __init__(self, *events: bytes | Exception | None) -> None:
        self.script = events
        self.waiting = asyncio.Event()
        self.closed = False

    async def events(self) -> AsyncIterator[bytes]:
        try:
            for item in self.script:
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    self.waiting.set()
                    await asyncio.Event().wait()
                else:
                    yield item
        finally:
            self.closed = True

    def app(self) -> Starlette:
        async def stream(request: Request) -> Response:
            return await stream_response(self.events(), headers=lambda: {"Server-Timing": "placed;dur=1.0"})

        return app_with(Route("/stream", stream))


def test_a_stream_sends_its_events_as_they_are() -> None:
    stream = Stream(b"data: 1\n\n", b"data: [DONE]\n\n")
    exchange = ask(get("/stream"), stream.app())
    assert (exchange.status, exchange.content, exchange.complete) == (200, b"data: 1\n\ndata: [DONE]\n\n", True)
    assert exchange.answer_headers["content-type"].startswith("text/event-stream")
    assert exchange.answer_headers["server-timing"] == "placed;dur=1.0"
    assert "content-length" not in exchange.answer_headers
    assert stream.closed


def test_an_error_before_the_first_event_is_an_ordinary_answer() -> None:
    exchange = ask(get("/stream"), Stream(Unavailable("no engine")).app())
    assert exchange.status == 503
    assert error_of(exchange).message == "no engine"


@pytest.mark.parametrize(
    ("error", "message"),
    [(TransferError("epoch", "gone"), b"KV transfer failed (epoch): gone"), (KeyError("secret"), b"internal error")],
)
def test_a_later_error_ends_the_stream_with_an_error_event(error: Exception, message: bytes) -> None:
    stream = Stream(b"data: 1\n\n", error)
    exchange = ask(get("/stream"), stream.app())
    first, failure, done, rest = exchange.content.split(b"\n\n")
    assert (exchange.status, first, done, rest) == (200, b"data: 1", b"data: [DONE]", b"")
    assert message in failure and b"secret" not in failure
    assert msgspec.json.decode(failure.removeprefix(b"data: "))["error"]["code"] == 500
    assert exchange.complete and stream.closed


@pytest.mark.parametrize("script", [(None,), (b"data: 1\n\n", None)])
def test_a_stream_is_closed_when_the_client_goes_away(script: tuple[bytes | None, ...]) -> None:
    async def scenario() -> None:
        stream = Stream(*script)
        exchange = get("/stream")
        running = asyncio.ensure_future(exchange.run(stream.app()))
        await stream.waiting.wait()
        exchange.disconnect.set()
        await running
        assert stream.closed

    asyncio.run(scenario())


@pytest.mark.parametrize(("script", "status"), [((None,), 503), ((b"data: 1\n\n", None), 200)])
def test_a_drain_deadline_ends_a_stream_with_an_error(script: tuple[bytes | None, ...], status: int) -> None:
    async def scenario() -> None:
        stream = Stream(*script)
        exchange = get("/stream")
        running = asyncio.ensure_future(exchange.run(stream.app()))
        await stream.waiting.wait()
        running.cancel()
        await running
        assert (exchange.status, exchange.complete, stream.closed) == (status, True, True)
        assert b"shutting down" in exchange.content

    asyncio.run(scenario())


def test_an_unstreamed_answer_is_cancelled_when_the_client_goes_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> list[str]:
        started, ends = asyncio.Event(), []

        async def work() -> str:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ends.append("cancelled")
            return "never"

        async def slow(request: Request) -> Response:
            await read_body(request, Body)
            return json_response(await run_until_disconnect(request, work()))

        exchange = post("/slow", b'{"name": "a"}')
        running = asyncio.ensure_future(exchange.run(app_with(Route("/slow", slow, methods=["POST"]))))
        await started.wait()
        exchange.disconnect.set()
        await running
        assert exchange.status == 0
        return ends

    assert asyncio.run(scenario()) == ["cancelled"]
    assert caplog.text == ""


def test_an_unstreamed_answer_passes_its_result_and_its_errors_on() -> None:
    async def right() -> int:
        return 7

    async def wrong() -> int:
        raise ClientError("no", param="n")

    async def endpoint(request: Request) -> Response:
        return json_response(await run_until_disconnect(request, right() if request.method == "GET" else wrong()))

    app = app_with(Route("/work", endpoint, methods=["GET", "POST"]))
    assert ask(get("/work"), app).json() == 7
    assert error_of(ask(post("/work", b""), app)).param == "n"
