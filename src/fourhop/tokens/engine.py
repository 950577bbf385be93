"""`RemoteEngine`: an engine over HTTP, for a router: its control endpoints, and tokens the way that it speaks."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from fourhop.tokens.client import RemoteTokenServer
from fourhop.tokens.completions import COMPLETIONS
from fourhop.tokens.connection import Session, Timeouts, call
from fourhop.tokens.continued import Continued
from fourhop.tokens.dialect import GENERATE, Dialect
from fourhop.tokens.motion import Motion, motion_of
from fourhop.tokens.server import TokenServer
from fourhop.tokens.vllm import VLLMTokenServer
from fourhop.tokens.worker import RemoteWorker, ServedModel
from fourhop.wire.errors import PeerError, PeerRefused
from fourhop.wire.generate import GenerateChunk, GenerateRequest, SamplingParams
from fourhop.wire.worker import WorkerInfo

log = logging.getLogger(__name__)


class RemoteEngine(RemoteWorker):
    """A fourhop engine, or a stock vLLM with the token endpoint or without. `check` finds out which.

    `bootstrap_url` is where a Mooncake prefill engine says what it is called. Ours says itself that it hangs. A stock
    vLLM is ill when it owes tokens, its counters stand still for `stall_timeout_s` (`motion`), and it does not make a
    token that it is asked for; it is well again with the next token or movement.
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
        stall_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(url, session, timeout_s=probe_timeout_s, api_key=api_key)
        self._own: TokenServer = RemoteTokenServer(url, session, timeouts=timeouts, api_key=api_key, entry=self._entry)
        self._stock: dict[Dialect, TokenServer] = {
            dialect: Continued(
                VLLMTokenServer(url, session, timeouts=timeouts, api_key=api_key, dialect=dialect, entry=self._entry)
            )
            for dialect in (GENERATE, COMPLETIONS)
        }
        self._dialect: Dialect | None = None
        self._bootstrap_url = bootstrap_url
        self._motion = Motion(stall_timeout_s)
        self._probe_timeout_s = probe_timeout_s
        self._clock = clock
        self._numbers = itertools.count()

    async def check(self) -> WorkerInfo | None:
        try:
            info = await super().check()
            if info is not None:
                self._dialect, self.served = None, None
                if not self._entry.is_open:
                    await super().abort([])  # health and worker need no key
            elif self._dialect is None or not self._entry.is_open:
                self.served = await self._ask_served()
                self._dialect = await self._ask_dialect()
            self._entry.is_open = True
        except PeerError:
            self._dialect, self._entry.is_open = None, False  # what comes up again may be another server
            self._motion.forget()
            raise
        if self._dialect is not None:
            await self._expect_progress(self._dialect)
        if info is None and self._bootstrap_url is not None:
            self.engine_id = await self._name(self._bootstrap_url)
        return info

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        server = self._own if self._dialect is None else self._stock[self._dialect]
        return server.generate(request)

    async def abort(self, request_ids: list[str]) -> None:
        """Also of a server that has no way to be told: the connection of a request that is left was closed."""
        if self._dialect is not COMPLETIONS:
            await super().abort(request_ids)

    async def _ask_served(self) -> ServedModel | None:
        """The first of the models that it lists, None if it lists none."""
        status, body = await self._call("GET", "/v1/models", accepted=(200, 404))
        models = self._decode(body, _Models, "/v1/models").data if status == 200 else []
        return models[0] if models else None

    async def _ask_dialect(self) -> Dialect:
        """Whether a stock vLLM has the token endpoint: one without refuses to abort nothing."""
        try:
            await super().abort([])
        except PeerRefused as error:
            if error.status not in (403, 404):
                raise
            log.warning("%s has no token endpoint; tokens come from its completions, with less detail", self.url)
            return COMPLETIONS
        return GENERATE

    async def _expect_progress(self, dialect: Dialect) -> None:
        """Raises PeerError if the engine owes tokens and makes none, though its server answers for it."""
        owes = self._session.awaits(self.url + dialect.path)
        if not self._motion.wants_a_look(owes=owes, now_s=self._clock()):
            return
        self._motion.note(await self._moved(), self._clock())
        if self._motion.is_still(self._clock()):
            self._motion.settle(hangs=not await self._makes_a_token(), now_s=self._clock())
        if self._motion.hangs:
            raise PeerError(f"{self.url} makes no token although it has work, and its counters stand still")

    async def _moved(self) -> bytes | None:
        """What its metrics say of its work; None if they say nothing."""
        try:
            status, body = await self._call("GET", "/metrics", accepted=range(200, 600))
        except PeerError:
            return None
        return motion_of(body) if status == 200 else None

    async def _makes_a_token(self) -> bool:
        """Whether it answers a request for one token: its server alone cannot, and one that waits for KV can."""
        params = SamplingParams(max_tokens=1, temperature=0.0)
        request = GenerateRequest(token_ids=[0], sampling_params=params, request_id=f"alive-{next(self._numbers)}")
        try:
            async with asyncio.timeout(self._probe_timeout_s), aclosing(self.generate(request)) as chunks:
                await anext(chunks)
        except (TimeoutError, PeerError):
            return False
        return True

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


class _Models(msgspec.Struct):
    data: list[ServedModel] = []


class _Rank(msgspec.Struct):
    engine_id: str
