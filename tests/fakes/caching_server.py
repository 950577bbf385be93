"""A completions server with a prefix cache, on a real socket: enough of one for `fourhop bench serve` to measure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from contracts.token_server import until
from fakes.scripted_server import DONE, chat, event, usage

BLOCK_SIZE = 16


@dataclass
class CachingServer:
    """Answers each prompt with as many tokens as are asked for. What it leaves out or says wrong is for the test to
    choose: ids, usage, `usage_error` added to the output tokens that it tells, `template_tokens` to those of a chat.
    """

    tells_ids: bool = True
    tells_usage: bool = True
    usage_error: int = 0
    template_tokens: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    num_queried: int = 0
    num_hit: int = 0
    num_open: int = 0
    _blocks: set[tuple[int, ...]] = field(default_factory=set)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Its URL."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        await until(lambda: self.num_open == 0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                lengths = [line.partition(":")[2] for line in head.splitlines() if line.startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0]) if lengths else 0)
                kind, answer = ("text/plain", self._metrics()) if head.startswith("get") else self._answer(body)
                framing = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(answer)}\r\n\r\n"
                writer.write(framing.encode() + answer)
        except asyncio.IncompleteReadError:
            writer.close()
            await writer.wait_closed()
        finally:
            self.num_open -= 1

    def _metrics(self) -> bytes:
        return (
            f"vllm:prefix_cache_queries_total {self.num_queried}\nvllm:prefix_cache_hits_total {self.num_hit}\n"
        ).encode()

    def _answer(self, body: bytes) -> tuple[str, bytes]:
        request = json.loads(body)
        is_chat = "messages" in request
        prompt = [ord(c) for c in request["messages"][-1]["content"]] if is_chat else request["prompt"]
        self._look_up(prompt)
        num_output = request["max_completion_tokens" if is_chat else "max_tokens"]
        events = [self._token(is_chat, "length" if place + 1 == num_output else None) for place in range(num_output)]
        if self.tells_usage:
            num_prompt = len(prompt) + (self.template_tokens if is_chat else 0)
            events.append(usage(num_prompt, num_output + self.usage_error))
        return "text/event-stream", b"".join([*events, DONE])

    def _token(self, is_chat: bool, finish: str | None) -> bytes:
        """One space, which is a token of its own."""
        if is_chat:
            return chat(content=" ", finish=finish)
        ids: dict[str, Any] = {"token_ids": [32]} if self.tells_ids else {}
        return event(choices=[{"index": 0, "text": " ", "finish_reason": finish, **ids}])

    def _look_up(self, prompt: list[int]) -> None:
        self.prompts.append(prompt)
        self.num_queried += len(prompt)
        ends = range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)
        known = [end for end in ends if tuple(prompt[:end]) in self._blocks]
        self.num_hit += max(known, default=0)
        self._blocks.update(tuple(prompt[:end]) for end in ends)
