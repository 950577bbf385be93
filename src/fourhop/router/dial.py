"""Connecting to engines: a router's `dial`, which tests replace."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fourhop.router.config import RouterConfig
from fourhop.router.policy import EngineRole
from fourhop.router.worker import Control
from fourhop.tokens.connection import Timeouts, open_session
from fourhop.tokens.engine import RemoteEngine
from fourhop.tokens.names import LookUp
from fourhop.tokens.server import TokenServer

Dial = Callable[[str, EngineRole], tuple[TokenServer, Control]]
"""An engine by its URL and role."""


@asynccontextmanager
async def dial_http(config: RouterConfig, look_up: LookUp | None = None) -> AsyncIterator[Dial]:
    """Engines behind their URLs, over one pool of connections."""
    timeouts = Timeouts(config.connect_timeout_s, config.first_chunk_timeout_s, config.idle_timeout_s)
    async with open_session(look_up=look_up) as session:

        def dial(url: str, role: EngineRole) -> tuple[TokenServer, Control]:
            endpoint = config.endpoint(url)
            engine = RemoteEngine(
                url,
                session,
                timeouts=timeouts,
                probe_timeout_s=config.probe_timeout_s,
                api_key=config.upstream_api_key,
                stall_timeout_s=config.stall_timeout_s,
                bootstrap_url=f"http://{endpoint.host}:{endpoint.bootstrap_port}"
                if config.handoff == "mooncake" and role == "prefill"
                else None,
            )
            return engine, engine

        yield dial
