"""Clients that speak to engines without a router, as the guide does: two legs, early and late tickets, prefixes, moves.

Whatever such a client leaves behind, the engines have to get rid of by themselves.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from faults.machine import Machine
from fourhop.tokens.client import RemoteTokenServer
from fourhop.tokens.connection import Session, Timeouts
from fourhop.tokens.worker import RemoteWorker
from fourhop.wire.errors import FourhopError, PeerError
from fourhop.wire.generate import GenerateRequest
from fourhop.wire.worker import PrefixRequest

TIMEOUTS = Timeouts(connect_s=0.5, first_byte_s=8.0, idle_s=5.0)
Params = dict[str, Any]


class DirectClient:
    """One request by hand. `tokens` is what came of it, in order; `finish` how it ended, None if it did not."""

    def __init__(self, rng: random.Random, session: Session, request: GenerateRequest) -> None:
        self.tokens: list[int] = []
        self.finish: str | None = None
        self._rng = rng
        self._session = session
        self._request = request
        self._migrate: Callable[[], None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, prefill: Machine, decodes: list[Machine]) -> None:
        """Prefill, hand over, decode, and where a move is drawn go on at the next. Raises FourhopError."""
        try:
            ticket = await self._prefill(prefill, decodes[0])
            for decode in decodes:
                if self.finish is not None:
                    return
                if self._rng.random() < 0.2:
                    await asyncio.sleep(self._rng.expovariate(1.0))
                if self._rng.random() < 0.1:
                    return  # and nobody comes for the blocks
                if self._rng.random() < 0.4:
                    self._tasks.append(asyncio.create_task(self._move(decode)))
                ticket = await self._decode(decode, ticket)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _prefill(self, machine: Machine, holder: Machine) -> Params | None:
        """The ticket of a prefill leg, which may be there before its token."""
        early = self._rng.random() < 0.5
        prefix = await self._prefix(holder) if self._rng.random() < 0.5 else None
        hold: Params = {"do_remote_decode": True, "early_ticket": early}
        if prefix is not None:
            hold["prefix"] = prefix
        request = self._leg(hold, max_tokens=1)
        if not early:
            return await self._stream(machine, request, is_prefill=True)
        arrived: asyncio.Future[Params | None] = asyncio.get_running_loop().create_future()
        self._tasks.append(asyncio.create_task(self._prefill_beside(machine, request, arrived)))
        return await arrived

    async def _prefill_beside(
        self, machine: Machine, request: GenerateRequest, arrived: asyncio.Future[Params | None]
    ) -> None:
        """Give the ticket on as soon as it is there; the token will come with the KV."""
        try:
            server = RemoteTokenServer(machine.url, self._session, timeouts=TIMEOUTS)
            async with aclosing(server.generate(request)) as chunks:
                async for chunk in chunks:
                    if chunk.kv_transfer_params is not None and not arrived.done():
                        arrived.set_result(chunk.kv_transfer_params)
            if not arrived.done():
                arrived.set_exception(PeerError("no ticket came"))
        except FourhopError as error:
            if not arrived.done():
                arrived.set_exception(error)

    async def _decode(self, machine: Machine, ticket: Params | None) -> Params | None:
        return await self._stream(machine, self._leg(ticket), is_prefill=False)

    async def _stream(self, machine: Machine, request: GenerateRequest, *, is_prefill: bool) -> Params | None:
        ticket = None
        server = RemoteTokenServer(machine.url, self._session, timeouts=TIMEOUTS)
        async with aclosing(server.generate(request)) as chunks:
            async for chunk in chunks:
                ticket = chunk.kv_transfer_params or ticket
                for choice in chunk.choices:
                    self.tokens += choice.token_ids
                    if choice.finish_reason not in (None, "migrated") and not (is_prefill and ticket is not None):
                        self.finish = choice.finish_reason
        return ticket

    async def _prefix(self, machine: Machine) -> Params | None:
        with suppress(FourhopError):
            worker = RemoteWorker(machine.url, self._session, timeout_s=1.0)
            return await worker.hold_prefix(PrefixRequest(self._request.token_ids, self._request.cache_salt))
        return None

    async def _move(self, machine: Machine) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, 0.05))
        with suppress(FourhopError):
            await RemoteWorker(machine.url, self._session, timeout_s=1.0).migrate([self._request.request_id])

    def _leg(self, transfer: Params | None, max_tokens: int | None = None) -> GenerateRequest:
        params = self._request.sampling_params
        if max_tokens is not None:
            params = msgspec.structs.replace(params, max_tokens=max_tokens)
        return msgspec.structs.replace(
            self._request, sampling_params=params, output_token_ids=list(self.tokens), kv_transfer_params=transfer
        )
