"""A frontend whose text is done by another: it answers what that one would answer by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from fakes.asgi import Exchange
from fakes.serving import serving
from fakes.token_server import ScriptedTokenServer
from fakes.toy import write_toy_checkpoint
from fourhop.checkpoint import Checkpoint
from fourhop.frontend import app as frontend_app
from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.remote import RemoteFrontend, TextServer, create
from fourhop.service import ServerConfig
from fourhop.tokens.connection import Timeouts, open_session
from fourhop.wire.errors import ErrorBody, PeerRefused
from fourhop.wire.sse import DONE, SSEDecoder

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
ANSWER = "Zürich 👋 it is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"))


def script(text: str = ANSWER, **fields: Any) -> ScriptedTokenServer:
    """Three tokens a step, which cuts characters apart."""
    ids = list(text.encode())
    return ScriptedTokenServer([ids[place : place + 3] for place in range(0, len(ids), 3)], **fields)


async def well() -> str | None:
    return None


@asynccontextmanager
async def both(folder: Path, tokens: ScriptedTokenServer) -> AsyncIterator[tuple[Starlette, Starlette]]:
    """A frontend that does its text itself, and one that has it done."""
    checkpoint, server = Checkpoint("toy", folder), ServerConfig()
    text_app = frontend_app.create(FrontendConfig(), checkpoint, server)
    async with serving(text_app) as url, open_session() as session:
        remote = RemoteFrontend(TextServer(url, session, Timeouts()), tokens)
        yield frontend_app.create(FrontendConfig(), checkpoint, server, tokens), create(remote, server, well)


async def post(app: Starlette, path: str, body: Any, method: str = "POST") -> Exchange:
    headers = {"content-type": "application/json", "x-request-id": "one"}
    return await Exchange(method, path, headers, [json.dumps(body).encode()]).run(app)


def events(exchange: Exchange) -> list[Any]:
    assert (exchange.status, exchange.complete) == (200, True), exchange.content
    *data, last = SSEDecoder().feed(exchange.content)
    assert last == DONE
    return [json.loads(event) for event in data]


def told(body: dict[str, Any]) -> Any:
    """What a whole answer says."""
    choices = [
        (one["index"], one.get("text"), one.get("message", {}).get("content"), one["finish_reason"])
        for one in body["choices"]
    ]
    return body["id"], body["object"], choices, body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [(CHAT, {"messages": MESSAGES, "max_tokens": 20}), (COMPLETION, {"prompt": "hi", "max_tokens": 20})],
)
def test_a_whole_answer_is_that_of_a_frontend(folder: Path, path: str, asked: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with both(folder, script()) as (own, remote):
            expected, answer = await post(own, path, asked), await post(remote, path, asked)
            assert answer.status == 200, answer.content
            assert told(json.loads(answer.content)) == told(json.loads(expected.content))

    asyncio.run(scenario())


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("wants_usage", [False, True])
def test_a_stream_says_what_a_frontend_says(folder: Path, n: int, wants_usage: bool) -> None:
    async def scenario() -> None:
        tokens = script()
        asked = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": wants_usage}}
        async with both(folder, tokens) as (_, remote):
            *chunks, last = events(await post(remote, CHAT, asked))
            if not wants_usage:
                chunks.append(last)
            else:
                assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(ANSWER.encode())
            deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
            assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER
            assert not any("\ufffd" in (delta.get("content") or "") for delta in deltas)
            assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]][-1] == "length"
            assert {chunk["id"] for chunk in chunks} == {"chatcmpl-one"}
            assert tokens.num_open == 0

    asyncio.run(scenario())


def test_what_cannot_be_served_is_refused_with_its_path(folder: Path) -> None:
    wrong: dict[str, tuple[str, dict[str, Any]]] = {
        "prompt": (COMPLETION, {"prompt": ["a", "b"]}),
        "kv_transfer_params": (CHAT, {"messages": MESSAGES, "kv_transfer_params": {"do_remote_prefill": True}}),
        "messages": (CHAT, {}),
        "temperature": (CHAT, {"messages": MESSAGES, "temperature": 9}),
    }

    async def scenario() -> None:
        tokens = script()
        async with both(folder, tokens) as (_, remote):
            for param, (path, body) in wrong.items():
                for stream in (False, True):
                    answer = await post(remote, path, body | {"stream": stream})
                    assert answer.status == 400, answer.content
                    assert param in (json.loads(answer.content)["error"]["param"] or "")
            assert tokens.requests == []

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_servers_refusal_keeps_its_status(folder: Path, stream: bool) -> None:
    busy = PeerRefused(429, ErrorBody("later", "TooManyRequests", None, 429), retry_after_s=3)

    async def scenario() -> None:
        async with both(folder, script(stop_before=0, error=busy)) as (_, remote):
            answer = await post(remote, CHAT, {"messages": MESSAGES, "stream": stream})
            assert (answer.status, answer.answer_headers["retry-after"]) == (429, "3")

    asyncio.run(scenario())


def test_models_and_health_are_the_text_servers(folder: Path) -> None:
    async def scenario() -> None:
        async with both(folder, script()) as (own, remote):
            models = [await post(app, "/v1/models", None, "GET") for app in (own, remote)]
            ids = [[one["id"] for one in json.loads(answer.content)["data"]] for answer in models]
            assert ids[0] == ids[1] == ["toy"]
            assert (await post(remote, "/health", None, "GET")).status == 200

    asyncio.run(scenario())
