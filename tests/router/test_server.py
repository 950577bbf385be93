"""A router's process that is started again hears from the others which engines drain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from fakes.asgi import get
from fourhop.router.config import GoodputConfig, RouterConfig
from fourhop.router.server import create, draining
from fourhop.service import ServerConfig

HEALTH = b'{"status":"ok","engines":[{"engine":"http://127.0.0.1:9","role":"prefill","draining":true},'
HEALTH += b'{"engine":"http://127.0.0.1:7","role":"decode","draining":false}]}'


def test_what_others_drain_is_drained() -> None:
    async def others() -> Sequence[bytes]:
        return [b'{"error":{"message":"the server is shutting down"}}', HEALTH]

    async def scenario() -> None:
        config = RouterConfig(("http://127.0.0.1:9",), ("http://127.0.0.1:7",))
        app = create(config, GoodputConfig(), ServerConfig(), CollectorRegistry(), others=others)
        async with app.router.lifespan_context(app):
            told = msgspec.json.decode((await get("/health").run(app)).content)
        assert [engine["draining"] for engine in told["engines"]] == [True, False]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "health", [b"", b"[]", b"{}", b'{"engines":[{"engine":1}]}', b"\xff", b"Internal Server Error"]
)
def test_an_answer_that_is_no_health_keeps_no_process_from_starting(health: bytes) -> None:
    assert draining(health) == []
