"""Several processes behind one port that answer as one server where it matters.

Each process has a door of its own, a port of this host. What was asked of the shared port and is the affair of all is
asked of each at its door: metrics, told with the label `worker`; whatever changes what a server does, or looks for one
request, which one of them has.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fourhop.service.answers import error_answer
from fourhop.service.config import ServerConfig
from fourhop.service.run import bind
from fourhop.wire.errors import PayloadTooLarge, Unavailable

METRICS_PATH = "/metrics"
PATIENCE_S = 5.0
"""With a sibling. A drain asks an engine to move its streams before it answers."""
MAX_BODY_BYTES = 1 << 20
SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)")
PASSED_ON = ("authorization", "x-api-key", "content-type", "x-request-id")


@dataclass(frozen=True)
class Siblings:
    """All processes as number `number` sees them. `doors` listen for one process each, in the order of their numbers;
    `shared` are the beginnings of the paths that are everybody's affair, besides `/metrics`.
    """

    number: int
    doors: Sequence[socket.socket]
    shared: tuple[str, ...] = ()

    @property
    def door(self) -> socket.socket:
        return self.doors[self.number]

    @property
    def ports(self) -> list[int]:
        return [door.getsockname()[1] for door in self.doors]

    def is_shared(self, path: str) -> bool:
        return path == METRICS_PATH or path.startswith(self.shared)

    async def hear(self, path: str) -> list[bytes]:
        """What the others answer there, well or not; nothing from those that do not."""
        others = [port for number, port in enumerate(self.ports) if number != self.number]
        answers = await asyncio.gather(*(ask(port, "GET", path) for port in others))
        return [answer.body for answer in answers if answer is not None]


@contextmanager
def open_doors(count: int) -> Iterator[list[socket.socket]]:
    """A port for each process, held by whoever forks them, so that one that is started again has the same."""
    doors = [bind(ServerConfig(port=0)) for _ in range(count)]
    try:
        yield doors
    finally:
        for door in doors:
            door.close()


@dataclass
class Answer:
    """What one process answered."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
        else:
            self.body += message.get("body", b"")


class Together:
    """An app that answers for all processes where the path is everybody's affair and the shared port was asked."""

    def __init__(self, app: ASGIApp, siblings: Siblings) -> None:
        self._app = app
        self._siblings = siblings
        self._ports = siblings.ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_all = scope["type"] == "http" and self._siblings.is_shared(scope["path"])
        if not is_all or (scope.get("server") or ("", 0))[1] in self._ports:
            await self._app(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            answer: Response = error_answer(PayloadTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes"))
        else:
            answer = await self._answer(scope, body)
        await answer(scope, receive, send)

    async def _answer(self, scope: Scope, body: bytes) -> Response:
        own = await self._own(scope, body)
        if own.status not in (200, 404):  # refused: the others would refuse it as well
            return _response(own)
        others = [number for number in range(len(self._ports)) if number != self._siblings.number]
        given = Headers(scope=scope)
        headers = {name: given[name] for name in PASSED_ON if name in given} | {"accept": "text/plain"}
        path = scope["raw_path"].decode()
        asked = await asyncio.gather(
            *(ask(self._ports[number], scope["method"], path, headers, body) for number in others)
        )
        answers = dict(sorted([(self._siblings.number, own), *zip(others, asked, strict=True)]))
        if scope["path"] == METRICS_PATH:
            texts = {number: None if one is None else one.body.decode() for number, one in answers.items()}
            return Response(merged_metrics(texts), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
        silent = [number for number, one in answers.items() if one is None]
        if silent and scope["method"] != "GET":
            return error_answer(Unavailable(f"worker {silent[0]} does not answer; ask again", retry_after_s=1.0))
        told = [one for one in answers.values() if one is not None]
        failed = [one for one in told if one.status not in (200, 404)]
        if failed:
            return _response(failed[0])
        if scope["method"] == "GET":  # a request that was repeated may be known to two, each of which tells of its own
            return _response(next((one for one in told if one.status == 200), own))
        return merged(told, own)

    async def _own(self, scope: Scope, body: bytes) -> Answer:
        answer, is_read = Answer(), False

        async def receive() -> Message:
            nonlocal is_read
            if is_read:
                await asyncio.Event().wait()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        plain = [(b"accept", b"text/plain")] if scope["path"] == METRICS_PATH else []
        headers = [pair for pair in scope["headers"] if not plain or pair[0] != b"accept"]
        await self._app({**scope, "headers": headers + plain}, receive, answer.take)
        return answer


async def ask(
    port: int, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
) -> Answer | None:
    """What the process answers whose door this is; None if it answers nothing."""
    import aiohttp
    from yarl import URL

    url, timeout = URL(f"http://127.0.0.1:{port}{path}", encoded=True), aiohttp.ClientTimeout(total=PATIENCE_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
            session.request(method, url, data=body, headers=headers) as answer,
        ):
            told = await answer.read()
    except (aiohttp.ClientError, TimeoutError):
        return None
    return Answer(answer.status, [(name.lower(), value) for name, value in answer.raw_headers], told)


def merged(answers: Sequence[Answer], own: Answer) -> Response:
    """One answer for all: of those that could do it, with their whole numbers added up, or else our own."""
    done = [one for one in answers if one.status == 200]
    if len(done) <= 1:
        return _response(done[0] if done else own)
    if not all(one.body.startswith(b"{") for one in done):
        return _response(done[0])
    total: dict[str, Any] = {}
    for one in done:
        for key, value in msgspec.json.decode(one.body, type=dict[str, Any]).items():
            total[key] = total[key] + value if type(value) is int and key in total else total.get(key, value)
    return _response(Answer(200, done[0].headers, msgspec.json.encode(total)))


def merged_metrics(texts: dict[int, str | None]) -> str:
    """Expositions of several processes (Prometheus' text format 0.0.4) as one: each sample with the label `worker`."""
    families: dict[str, list[str]] = {
        "fourhop:worker_up": ["# HELP fourhop:worker_up 1 if the process answers.", "# TYPE fourhop:worker_up gauge"]
    }
    for number, text in texts.items():
        families["fourhop:worker_up"].append(f'fourhop:worker_up{{worker="{number}"}} {float(text is not None)}')
        name = ""
        for line in (text or "").split("\n"):
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_new = name not in families
                families.setdefault(name, [])
            if line.startswith("#"):
                families[name] += [line] if is_new else []
            elif line:
                families[name].append(_labelled(line, number))
    return "\n".join(line for lines in families.values() for line in lines) + "\n"


def _labelled(sample: str, number: int) -> str:
    name, rest = SAMPLE.split(sample, 1)[1:]
    worker = f'worker="{number}"'
    if rest.startswith("{"):
        return f"{name}{{{worker}{'' if rest.startswith('{}') else ','}{rest[1:]}"
    return f"{name}{{{worker}}}{rest}"


def _response(answer: Answer) -> Response:
    response = Response(answer.body, answer.status)
    kept = (b"content-type", b"x-request-id", b"www-authenticate", b"retry-after")
    response.raw_headers += [(name, value) for name, value in answer.headers if name in kept]
    return response


async def _body(receive: Receive) -> bytes | None:
    """None for one that is too large."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return bytes(body)
