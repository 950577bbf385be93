"""An app behind a real socket of this host, served by uvicorn inside the test's own event loop."""

from __future__ import annotations

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
            await server.shutdown(sockets=listeners)
