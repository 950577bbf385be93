"""A server for `bench.client`: answers whose bytes arrive at scripted times after the request. In virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fakes import virtual_time
from fourhop.wire.errors import FourhopError

DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def tokens(*ids: int, finish: str | None = None) -> bytes:
    """A chunk of the token endpoint."""
    return event(choices=[{"index": 0, "token_ids": list(ids), "finish_reason": finish}])


def text(piece: str, finish: str | None = None) -> bytes:
    """A chunk of plain completions without ids."""
    return event(choices=[{"index": 0, "text": piece, "finish_reason": finish}])


def chat(finish: str | None = None, **delta: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish}])


def usage(prompt: int, completion: int, **more: Any) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion, **more})


@dataclass(frozen=True)
class Script:
    """Reads of one answer: (seconds after the request, bytes). `error` comes instead of an answer, or at its end."""

    reads: Sequence[tuple[float, bytes]] = ()
    error: FourhopError | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "text/event-stream; charset=utf-8"})


class _Answer:
    def __init__(self, script: Script, start_s: float) -> None:
        self._script = script
        self._start_s = start_s
        self._left = list(script.reads)

    @property
    def headers(self) -> Mapping[str, str]:
        return self._script.headers

    async def read(self) -> bytes:
        if not self._left:
            if self._script.error is not None:
                raise self._script.error
            return b""
        after_s, data = self._left.pop(0)
        await asyncio.sleep(max(0.0, self._start_s + after_s - virtual_time.now()))
        return data


class ScriptedServer:
    """Gives each request the script that `script_of` makes of its body. Its `send` is a `bench.client.Send`."""

    def __init__(self, script_of: Callable[[dict[str, Any]], Script]) -> None:
        self._script_of = script_of
        self.requests: list[dict[str, Any]] = []
        self.sent_at_s: list[float] = []
        self.names: list[str] = []

    @asynccontextmanager
    async def send(self, body: bytes, headers: dict[str, str]) -> AsyncIterator[_Answer]:
        self.requests.append(json.loads(body))
        self.sent_at_s.append(virtual_time.now())
        self.names.append(headers["X-Request-Id"])
        script = self._script_of(self.requests[-1])
        if script.error is not None and not script.reads:
            raise script.error
        yield _Answer(script, virtual_time.now())
