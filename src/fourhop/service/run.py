"""Running a server: taking the port, signals, draining."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
import uvloop
from starlette.applications import Starlette

from fourhop.service.config import ServerConfig
from fourhop.wire.errors import StartError

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)

GARBAGE = 10_000
"""New objects after which the garbage collector looks at them."""

HURRY_S = 0.1
"""Between two looks for a second signal."""

KEEP_ALIVE_S = 75
"""Longer than our clients keep an idle connection, so that a server never closes one as a request arrives on it."""


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a command to its end on uvloop. SIGINT and SIGTERM cancel it, except while `serve` drains for them."""

    async def cancellable() -> None:
        task = asyncio.current_task()
        assert task is not None
        _on_signals(task.cancel)
        await main

    with suppress(asyncio.CancelledError):
        uvloop.run(cancellable())


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, in the task that `run` runs, a signal ends the process there and then: SIGINT by KeyboardInterrupt.

    For imports, which keep the event loop from hearing of signals and leave nothing to close.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in SIGNALS:
        loop.remove_signal_handler(number)
    try:
        yield
    finally:
        _on_signals(task.cancel)


def bind(config: ServerConfig) -> socket.socket:
    """Take the port, without listening: until `serve` a client is refused. Raises StartError when it is taken."""
    where = f"{config.host}:{config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"cannot listen on {where}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _listen_error(error, config) from None
    return listener


def _keep_what_is_there() -> None:
    """Spare the garbage collector what a server has from its start to its end: modules, routes, weights.

    What requests leave behind is seldom a cycle: it is looked for after thousands of objects, not hundreds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE, 20, 20)


def _listen_error(error: OSError, config: ServerConfig) -> StartError:
    if error.errno == errno.EADDRINUSE:
        return StartError(f"port {config.port} is in use")
    return StartError(f"cannot listen on {config.host}:{config.port}: {error.strerror}")


async def serve(
    app: Starlette,
    config: ServerConfig,
    *,
    listener: socket.socket | None = None,
    door: socket.socket | None = None,
    started: Callable[[], None] | None = None,
    stopping: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain.

    1. take the port (or use the `listener` that `bind` took earlier), 2. open the app's resources, 3. listen, call
    `started`; at a signal 4. await `stopping`, which ends by itself, and stop listening, 5. let open requests finish
    for `drain_timeout_s`, then end them with an error, 6. close the resources. A second SIGINT skips both waits.
    `door` is listened on as well. Raises StartError.
    """
    listener = listener or bind(config)
    with listener:
        async with app.router.lifespan_context(app):
            _keep_what_is_there()
            server = _Server(app, config, started, stopping)
            try:
                await server.serve([listener] if door is None else [listener, door])
            except OSError as error:
                raise _listen_error(error, config) from None


class _Server(uvicorn.Server):
    """uvicorn that tells when it listens, and whose signals stay inside this event loop."""

    def __init__(
        self,
        app: Starlette,
        config: ServerConfig,
        on_started: Callable[[], None] | None,
        on_stopping: Callable[[], Awaitable[None]] | None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=config.drain_timeout_s,  # type: ignore[arg-type] # passed to asyncio as it is
            )
        )
        self._on_started = on_started
        self._on_stopping = on_stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for address in (listener.getsockname() for listener in (sockets or [])[:1]):
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            log.info("listening on http://%s:%d", host, address[1])
        if self._on_started is not None:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._on_stopping is not None:
            await self._until_hurried(self._on_stopping())
        await self._until_hurried(super().shutdown(sockets))  # on uvloop it waits for every connection, forced or not
        if self.force_exit:
            for task in self.server_state.tasks:
                task.cancel()

    async def _until_hurried(self, work: Awaitable[None]) -> None:
        """Wait for it, but not beyond a second signal. What it fails at keeps no server from its end."""
        task = asyncio.ensure_future(work)
        await asyncio.wait([task], timeout=HURRY_S)
        while not task.done() and not self.force_exit:
            await asyncio.wait([task], timeout=HURRY_S)
        task.cancel()
        (failure,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(failure, Exception):
            log.error("what is done before the end failed", exc_info=failure)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        _on_signals(lambda: self.handle_exit(signal.SIGINT, None))
        try:
            yield
        finally:
            _on_signals(task.cancel)


def _on_signals(action: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, action)
