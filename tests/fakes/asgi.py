"""A client without a network: one request straight into an ASGI app, with the moment the client leaves in its hand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
from starlette.types import ASGIApp, Message


@dataclass
class Exchange:
    """One request and what came back so far. `disconnect` is set when the client is gone."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: list[bytes] = field(default_factory=list)
    disconnect: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 0
    answer_headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def content(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> object:
        return msgspec.json.decode(self.content)

    async def run(self, app: ASGIApp) -> Exchange:
        """Send the request; returns when the app has ended with it."""
        pending = [*self.body] or [b""]

        async def receive() -> Message:
            if pending:
                return {"type": "http.request", "body": pending.pop(0), "more_body": bool(pending)}
            await self.disconnect.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.answer_headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                self.chunks.append(message.get("body", b""))
                self.complete = not message.get("more_body", False)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in self.headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await app(scope, receive, send)
        return self


def post(path: str, body: bytes, **headers: str) -> Exchange:
    """A JSON POST. Header names are written with underscores."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Exchange("POST", path, {"content-type": "application/json", **named}, [body])


def get(path: str, **headers: str) -> Exchange:
    return Exchange("GET", path, {name.replace("_", "-"): value for name, value in headers.items()})
