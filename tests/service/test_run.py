"""Serving on a real socket: ports, start, drain, and the log's lines."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager

import httpx
import pytest
import uvloop
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fourhop.service import ServerConfig, bind, create_app, ended_by_signals, json_response, run, serve, stream_response
from fourhop.service.logs import LineFormatter, event
from fourhop.wire.errors import StartError

RunLoop = Callable[[Coroutine[None, None, None]], None]


class Server:
    """A server with one request that ends when the test says so, and one stream that never ends."""

    def __init__(self, drain_timeout_s: float = 5.0) -> None:
        self.config = ServerConfig(port=0, drain_timeout_s=drain_timeout_s)
        self.entered, self.finish, self.listening = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.story: list[str] = []
        self.app = create_app(
            routes=[Route("/wait", self.wait), Route("/endless", self.endless)],
            config=self.config,
            registry=CollectorRegistry(),
            resources=self.resources,
        )

    @asynccontextmanager
    async def resources(self) -> AsyncIterator[None]:
        self.story.append("open")
        yield
        self.story.append("close")

    async def wait(self, request: Request) -> Response:
        self.entered.set()
        await self.finish.wait()
        self.story.append("answered")
        return json_response("done")

    async def endless(self, request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            self.entered.set()
            await asyncio.Event().wait()

        return await stream_response(events())

    def run(
        self, scenario: Callable[[httpx.AsyncClient], Coroutine[None, None, None]], run_loop: RunLoop = asyncio.run
    ) -> None:
        async def main() -> None:
            listener = bind(self.config)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            serving = asyncio.ensure_future(serve(self.app, self.config, listener=listener, started=self.listening.set))
            await self.listening.wait()
            async with httpx.AsyncClient(base_url=url) as client:
                await scenario(client)
            await serving

        run_loop(main())


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def refused(client: httpx.AsyncClient) -> None:
    """Until the server of this client takes no new connection, or ends one that it has just taken."""
    while True:
        try:
            async with httpx.AsyncClient(base_url=client.base_url) as other:
                await other.get("/version")
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            return


def test_a_signal_lets_open_requests_finish_and_refuses_new_ones() -> None:
    server = Server()

    async def scenario(client: httpx.AsyncClient) -> None:
        assert (await client.get("/version")).status_code == 200
        waiting = asyncio.ensure_future(client.get("/wait"))
        await server.entered.wait()
        stop()
        await refused(client)
        server.finish.set()
        assert (await waiting).json() == "done"

    server.run(scenario)
    assert server.story == ["open", "answered", "close"]


def test_what_is_to_be_done_before_the_end_is_done_while_the_server_still_answers() -> None:
    told: list[int] = []

    async def main() -> None:
        server, config = Server(), ServerConfig(port=0)
        listener = bind(config)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/version"

        async def stopping() -> None:
            async with httpx.AsyncClient() as client:
                told.append((await client.get(url)).status_code)

        await serve(server.app, config, listener=listener, started=stop, stopping=stopping)

    asyncio.run(main())
    assert told == [200]


def test_a_second_signal_or_a_bug_ends_what_is_done_before_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def main(stopping: Callable[[], Awaitable[None]]) -> None:
        await serve(Server().app, ServerConfig(port=0), started=stop, stopping=stopping)

    async def hangs() -> None:
        stop()
        await asyncio.Event().wait()

    async def fails() -> None:
        raise KeyError("a bug")

    asyncio.run(main(hangs))
    assert not caplog.records
    asyncio.run(main(fails))
    assert [record.getMessage() for record in caplog.records] == ["what is done before the end failed"]


@pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run])
def test_a_second_signal_ends_what_a_drain_waits_for(run_loop: RunLoop) -> None:
    """On uvloop, which commands run on, a server that closes waits for its connections."""
    server = Server(drain_timeout_s=600.0)

    async def scenario(client: httpx.AsyncClient) -> None:
        reading = asyncio.ensure_future(client.get("/endless"))
        await server.entered.wait()
        stop()
        await refused(client)
        stop()
        text = (await reading).text
        assert text.startswith("data: 1\n\ndata: {") and text.endswith("data: [DONE]\n\n")
        assert "shutting down" in text

    server.run(scenario, run_loop)
    assert server.story == ["open", "close"]


def test_a_drain_that_takes_too_long_ends_streams_with_an_error_event() -> None:
    server = Server(drain_timeout_s=0.01)

    async def scenario(client: httpx.AsyncClient) -> None:
        reading = asyncio.ensure_future(client.get("/endless"))
        await server.entered.wait()
        stop()
        text = (await reading).text
        assert text.startswith("data: 1\n\ndata: {") and text.endswith("data: [DONE]\n\n")
        assert "shutting down" in text

    server.run(scenario)
    assert server.story == ["open", "close"]


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"^port {port} is in use$"):
            bind(ServerConfig(port=port))


def test_a_port_taken_between_bind_and_listen_is_the_same_line() -> None:
    first = bind(ServerConfig(port=0))
    config = ServerConfig(port=first.getsockname()[1])
    second = bind(config)
    app = create_app(routes=[], config=config, registry=CollectorRegistry())
    with first:
        first.listen()
        with pytest.raises(StartError, match="in use"):
            asyncio.run(serve(app, config, listener=second))


def test_an_address_that_is_not_ours_is_a_start_error() -> None:
    with pytest.raises(StartError, match=r"cannot listen on 203\.0\.113\.1:8000"):
        bind(ServerConfig(host="203.0.113.1"))
    with pytest.raises(StartError, match=r"cannot listen on no\.such\.host\.invalid:8000"):
        bind(ServerConfig(host="no.such.host.invalid"))


def test_resources_that_cannot_open_stop_the_start() -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise StartError("no weights")
        yield

    config = ServerConfig(port=0)
    app = create_app(routes=[], config=config, registry=CollectorRegistry(), resources=broken)
    with pytest.raises(StartError, match="no weights"):
        asyncio.run(serve(app, config))


@pytest.mark.parametrize("wrong", [{"port": -1}, {"port": 65536}, {"max_body_bytes": 0}, {"drain_timeout_s": -1.0}])
def test_a_config_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ServerConfig(**wrong)  # type: ignore[arg-type]


def test_an_event_is_key_value() -> None:
    line = event("request", request_id="a b", status=200, seconds=0.12345, reason=None, text='say "hi"\n')
    assert line == 'request request_id="a b" status=200 seconds=0.1235 text="say \\"hi\\"\\\\n"'


def test_a_log_record_is_one_line() -> None:
    record = logging.LogRecord("fourhop.router", logging.INFO, "f.py", 1, "forged\n%s", ("line\r",), None)
    record.created, record.msecs = 1_700_000_000.0, 7.0
    assert LineFormatter().format(record) == "2023-11-14T22:13:20.007Z info fourhop.router forged\\nline\\r"


def test_an_import_is_ended_by_a_signal_there_and_then() -> None:
    """Afterwards a signal cancels the command as before."""
    story: list[str] = []

    async def main() -> None:
        with pytest.raises(KeyboardInterrupt), ended_by_signals():
            signal.raise_signal(signal.SIGINT)
            story.append("the import went on")
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    run(main())
    assert story == []
