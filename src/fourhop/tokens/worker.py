"""`RemoteWorker`: what a router asks of an engine besides tokens: is it well, who is it, what does it hold."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, TypeVar

import msgspec

from fourhop.tokens.connection import Session, Timeouts, call, request_headers
from fourhop.tokens.refusal import Entry
from fourhop.wire.errors import PeerError, PeerRefused
from fourhop.wire.generate import AbortRequest
from fourhop.wire.ticket import KVTicket
from fourhop.wire.worker import (
    Leases,
    MigrateAnswer,
    MigrateRequest,
    PrefixAnswer,
    PrefixRequest,
    RenewAnswer,
    RenewRequest,
    WorkerInfo,
)

T = TypeVar("T")

ID_PREFIX = "generate-tokens-"
"""What the token endpoint puts before a request's id."""

NO_MODEL = "none: give the KV back"
"""A model that no server has."""

COMPLETIONS_PATH = "/v1/completions"
ABORT_PATH = "/inference/v1/abort_requests"
MIGRATE_PATH = "/inference/v1/migrate"
LEASES_PATH = "/kv/leases"
RENEW_PATH = "/kv/renew"
PREFIX_PATH = "/kv/prefix"


class ServedModel(msgspec.Struct, frozen=True):
    """A stock vLLM's model, of `/v1/models`: what it is called, where its files are, its longest sequence."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class RemoteWorker:
    """The control endpoints of an engine over HTTP. Every call ends within a few times `timeout_s`.

    `engine_id` is what its peers call it, for a hand-over whose router has to tell them; empty where it need not.
    `served` is what a stock vLLM serves, which is all that it says of itself.
    """

    engine_id = ""
    served: ServedModel | None = None

    def __init__(self, url: str, session: Session, *, timeout_s: float = 2.0, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._timeouts = Timeouts(connect_s=timeout_s, first_byte_s=timeout_s, idle_s=timeout_s)
        self._headers = request_headers(api_key)
        self._entry = Entry(self.url)

    async def check(self) -> WorkerInfo | None:
        """What the engine says of itself, None for one that does not (a stock vLLM). Raises PeerError if it is ill."""
        status, body = await self._call("GET", "/health", accepted=(200, 503))
        if status == 503:
            raise PeerError(f"{self.url} is not healthy: {_reason(body)}")
        try:
            _, body = await self._call("GET", "/worker")
        except PeerRefused as error:
            if error.status == 404:
                return None
            raise
        return self._decode(body, WorkerInfo, "/worker")

    async def abort(self, request_ids: list[str]) -> None:
        """Stop these requests and release what they hold; ids of requests or tickets. Unknown ids are ignored."""
        named = [ID_PREFIX + name for name in request_ids]  # as vLLM wants them; ours take them too
        await self._call("POST", ABORT_PATH, msgspec.json.encode(AbortRequest(named)))

    async def refuse(self, transfer: dict[str, Any]) -> None:
        """Have a stock vLLM refuse a request with these transfer parameters: it tells who holds the KV to free it."""
        body = {"model": NO_MODEL, "prompt": [0], "max_tokens": 1, "kv_transfer_params": transfer}
        await self._call("POST", COMPLETIONS_PATH, msgspec.json.encode(body), accepted=(404,))

    async def leases(self) -> Leases:
        """The tickets that the engine keeps blocks for."""
        _, body = await self._call("GET", LEASES_PATH)
        return self._decode(body, Leases, LEASES_PATH)

    async def renew(self, ticket_ids: list[str]) -> list[KVTicket]:
        """Keep tickets for another lease; returns those that the engine still knows."""
        return (await self._ask(RENEW_PATH, RenewRequest(ticket_ids), RenewAnswer)).tickets

    async def hold_prefix(self, request: PrefixRequest) -> dict[str, Any] | None:
        """A ticket for the longest beginning that the engine still has, as transfer parameters; None if it has none."""
        return (await self._ask(PREFIX_PATH, request, PrefixAnswer)).kv_transfer_params

    async def migrate(self, request_ids: list[str]) -> int:
        """Have the streams of these requests end, to be gone on with elsewhere; returns how many there were."""
        return (await self._ask(MIGRATE_PATH, MigrateRequest(request_ids), MigrateAnswer)).num_migrated

    def cut(self) -> None:
        """Give the engine up: every call to it that is open ends in PeerTimeout."""
        self._session.cut(self.url)

    async def _ask(self, path: str, question: object, kind: type[T]) -> T:
        _, body = await self._call("POST", path, msgspec.json.encode(question))
        return self._decode(body, kind, path)

    def _decode(self, body: bytes, kind: type[T], path: str) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise PeerError(f"{self.url}{path} is not what it should be: {error}") from None

    async def _call(
        self, method: str, path: str, body: bytes = b"", accepted: Container[int] = (200,)
    ) -> tuple[int, bytes]:
        async with call(
            self._session,
            method,
            self.url + path,
            timeouts=self._timeouts,
            body=body,
            headers=self._headers,
            accepted=accepted,
            entry=self._entry,
        ) as answer:
            return answer.status, await answer.read_all()


class _Health(msgspec.Struct):
    status: str = "no reason given"


def _reason(body: bytes) -> str:
    """Why an engine is not healthy. vLLM gives none: its body is empty."""
    try:
        return msgspec.json.decode(body, type=_Health).status
    except msgspec.DecodeError:
        return _Health().status
