"""`RemoteEngine`: an engine over HTTP, for a router: its control endpoints, and tokens the way that it speaks."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec

from fourhop.tokens.client import RemoteTokenServer
from fourhop.tokens.connection import Session, Timeouts, call
from fourhop.tokens.continued import Continued
from fourhop.tokens.server import TokenServer
from fourhop.tokens.vllm import VLLMTokenServer
from fourhop.tokens.worker import RemoteWorker
from fourhop.wire.errors import PeerError
from fourhop.wire.generate import GenerateChunk, GenerateRequest
from fourhop.wire.worker import WorkerInfo


class RemoteEngine(RemoteWorker):
    """A fourhop engine, or a stock vLLM with the token endpoint. `check` finds out which.

    `bootstrap_url` is where a Mooncake prefill engine says what it is called.
    """

    def __init__(
        self,
        url: str,
        session: Session,
        *,
        timeouts: Timeouts,
        probe_timeout_s: float,
        api_key: str | None = None,
        bootstrap_url: str | None = None,
    ) -> None:
        super().__init__(url, session, timeout_s=probe_timeout_s, api_key=api_key)
        self._own: TokenServer = RemoteTokenServer(url, session, timeouts=timeouts, api_key=api_key)
        self._stock: TokenServer = Continued(VLLMTokenServer(url, session, timeouts=timeouts, api_key=api_key))
        self._tokens: TokenServer = self._own
        self._bootstrap_url = bootstrap_url

    async def check(self) -> WorkerInfo | None:
        info = await super().check()
        self._tokens = self._stock if info is None else self._own
        if info is None and self._bootstrap_url is not None:
            self.engine_id = await self._name(self._bootstrap_url)
        return info

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        return self._tokens.generate(request)

    async def _name(self, bootstrap_url: str) -> str:
        """What the engine's bootstrap server calls it: of several data-parallel ranks the first."""
        async with call(self._session, "GET", bootstrap_url + "/query", timeouts=self._timeouts) as answer:
            body = await answer.read_all()
        try:
            ranks = msgspec.json.decode(body, type=dict[int, _Rank])
        except msgspec.DecodeError as error:
            raise PeerError(f"{bootstrap_url}/query is not what it should be: {error}") from None
        if not ranks:
            raise PeerError(f"{bootstrap_url} knows no engine yet")
        return ranks[min(ranks)].engine_id


class _Rank(msgspec.Struct):
    engine_id: str
