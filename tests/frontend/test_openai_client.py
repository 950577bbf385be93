"""OpenAI's own client against the app: what it sends is understood, what it gets parses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from fakes.token_server import ScriptedTokenServer
from fakes.toy import write_toy_checkpoint
from fourhop.checkpoint import Checkpoint
from fourhop.frontend.app import create
from fourhop.frontend.config import FrontendConfig
from fourhop.service import ServerConfig

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"))


def talk(folder: Path, conversation: Callable[[AsyncOpenAI], Awaitable[None]]) -> None:
    upstream = ScriptedTokenServer([[72], [105, 33]])
    app = create(FrontendConfig(), Checkpoint("toy", folder), ServerConfig(api_key=("secret",)), upstream)

    async def run() -> None:
        transport = httpx2.ASGITransport(app)
        async with (
            httpx2.AsyncClient(transport=transport) as http,
            AsyncOpenAI(base_url="http://toy/v1", api_key="secret", http_client=http, max_retries=0) as client,
        ):
            await conversation(client)

    asyncio.run(run())


def test_chat(folder: Path) -> None:
    async def conversation(client: AsyncOpenAI) -> None:
        whole = await client.chat.completions.create(model="toy", messages=MESSAGES, max_completion_tokens=3)
        assert whole.choices[0].message.content == "Hi!"
        assert whole.usage is not None and whole.usage.completion_tokens == 3
        stream = await client.chat.completions.create(
            model="toy", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == "Hi!"
        assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == [whole.usage.total_tokens]

    talk(folder, conversation)


def test_completion_and_models(folder: Path) -> None:
    async def conversation(client: AsyncOpenAI) -> None:
        whole = await client.completions.create(model="toy", prompt=["a", "b"], max_tokens=3)
        assert [choice.text for choice in whole.choices] == ["Hi!", "Hi!"]
        stream = await client.completions.create(model="toy", prompt="a", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hi!"
        assert [model.id async for model in client.models.list()] == ["toy"]

    talk(folder, conversation)


def test_errors(folder: Path) -> None:
    async def conversation(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="temperature") as caught:
            await client.chat.completions.create(model="toy", messages=MESSAGES, temperature=9)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt", messages=MESSAGES)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()

    talk(folder, conversation)
