"""An app behind a real socket of this host, served by uvicorn inside the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp


@asynccontextmanager
async def serving(
    app: ASGIApp,
    *,
    keep_alive_s: int = 5,
    certificate: Path | None = None,
    key: Path | None = None,
    door: socket.socket | None = None,
) -> AsyncIterator[str]:
    """The app's URL, while it is served, also on `door`. With a certificate over TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listeners = [listener] if door is None else [listener, door]
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=1,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=listeners)
        try:
            yield f"{'http' if certificate is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            await stop_listening(server)
            await server.shutdown(sockets=listeners)


async def stop_listening(server: uvicorn.Server) -> None:
    """What was accepted just now is known to the server some turns of the loop later, if it is open then: asyncio
    leaves a connection open that is accepted in the very turn in which its server closes (CPython issue 109564).
    """
    loop = asyncio.get_running_loop()
    for listening in server.servers:
        for door in listening.sockets:
            loop.remove_reader(door)
    for _ in range(3):
        await asyncio.sleep(0)
    for listening in server.servers:
        listening.close()
