"""Case 79 before there is a prompt: a client that leaves while its text waits to be rendered waits no longer."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from contracts.token_server import until
from fakes.asgi import post
from fakes.serving import serving
from fakes.token_server import ScriptedTokenServer
from fakes.toy import write_toy_checkpoint
from fourhop.checkpoint import Checkpoint
from fourhop.frontend import app, remote
from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.render import Renderer
from fourhop.service import ServerConfig
from fourhop.tokens.connection import Timeouts, open_session

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/render": CHAT,
    "/v1/completions": TEXT,
    "/v1/completions/render": TEXT,
    "/v1/responses": {"input": "hi"},
    "/v1/responses/render": {"input": "hi"},
    "/v1/messages": CHAT,
    "/v1/messages/render": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"], "model": "toy"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
}


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, no chat and no text is done being rendered."""
    done = threading.Event()

    def waits(*args: Any, **kwargs: Any) -> Any:
        done.wait()
        raise AssertionError("nobody is left who wants it")

    for name in ("chat", "completion"):
        monkeypatch.setattr(Renderer, name, waits)
    return done


def frontend(folder: Path, registry: CollectorRegistry, tokens: ScriptedTokenServer) -> Starlette:
    config = FrontendConfig(num_render_workers=1)
    return app.create(config, Checkpoint("toy", folder), ServerConfig(), tokens, registry=registry)


@pytest.mark.parametrize("path", BODIES)
def test_what_has_not_begun_is_dropped(tmp_path: Path, busy: threading.Event, path: str) -> None:
    registry, tokens = CollectorRegistry(), ScriptedTokenServer([[1]])
    served = frontend(write_toy_checkpoint(tmp_path), registry, tokens)

    def waiting() -> float | None:
        return registry.get_sample_value("fourhop:render_waiting")

    async def scenario() -> None:
        first = post("/v1/chat/completions", msgspec.json.encode(CHAT))
        holding = asyncio.create_task(first.run(served))
        await until(lambda: waiting() == 1)
        leaving = post(path, msgspec.json.encode(BODIES[path]))
        left = asyncio.create_task(leaving.run(served))
        await until(lambda: waiting() == 2)
        leaving.disconnect.set()
        await left
        assert (waiting(), leaving.status) == (1, 0)
        first.disconnect.set()
        await holding
        assert waiting() == 0
        busy.set()
        assert tokens.requests == []

    asyncio.run(scenario())


def test_what_is_rendered_elsewhere_is_given_up(tmp_path: Path, busy: threading.Event) -> None:
    """The call to the text server ends with the client, and with it what waits there."""
    registry, tokens = CollectorRegistry(), ScriptedTokenServer([[1]])
    text = frontend(write_toy_checkpoint(tmp_path), registry, tokens)

    async def well() -> str | None:
        return None

    async def scenario() -> None:
        async with serving(text) as url, open_session() as session:
            over = remote.RemoteFrontend(remote.TextServer(url, session, Timeouts()), tokens)
            exchange = post("/v1/chat/completions", msgspec.json.encode(CHAT))
            asking = asyncio.create_task(exchange.run(remote.create(over, ServerConfig(), well)))
            await until(lambda: registry.get_sample_value("fourhop:render_waiting") == 1)
            exchange.disconnect.set()
            await asking
            await until(lambda: registry.get_sample_value("fourhop:render_waiting") == 0)
            busy.set()
            assert tokens.requests == []

    asyncio.run(scenario())
