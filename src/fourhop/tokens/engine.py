"""`RemoteEngine`: an engine over HTTP, for a router: its control endpoints, and tokens the way that it speaks."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fourhop.tokens.client import RemoteTokenServer
from fourhop.tokens.connection import Session, Timeouts
from fourhop.tokens.continued import Continued
from fourhop.tokens.server import TokenServer
from fourhop.tokens.vllm import VLLMTokenServer
from fourhop.tokens.worker import RemoteWorker
from fourhop.wire.generate import GenerateChunk, GenerateRequest
from fourhop.wire.worker import WorkerInfo


class RemoteEngine(RemoteWorker):
    """A fourhop engine, or a stock vLLM with the token endpoint. `check` finds out which."""

    def __init__(
        self, url: str, session: Session, *, timeouts: Timeouts, probe_timeout_s: float, api_key: str | None = None
    ) -> None:
        super().__init__(url, session, timeout_s=probe_timeout_s, api_key=api_key)
        self._own: TokenServer = RemoteTokenServer(url, session, timeouts=timeouts, api_key=api_key)
        self._stock: TokenServer = Continued(VLLMTokenServer(url, session, timeouts=timeouts, api_key=api_key))
        self._tokens: TokenServer = self._own

    async def check(self) -> WorkerInfo | None:
        info = await super().check()
        self._tokens = self._stock if info is None else self._own
        return info

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        return self._tokens.generate(request)
