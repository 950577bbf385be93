"""The engine as a `TokenServer`: requests become jobs of the loop, its updates become chunks."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import TypeVar

import msgspec

from fourhop.engine.grammar import PARAM, Allowed, Grammars
from fourhop.engine.jobs import Job, Update
from fourhop.engine.loop import EngineLoop
from fourhop.engine.sequence import Sequence
from fourhop.kv.config import KVTransferConfig
from fourhop.service.fallbacks import Seldom
from fourhop.tokens.choices import merge_choices, split_choices, with_seed
from fourhop.tokens.limits import Limits, check_request, check_token_ids, resolve_max_tokens
from fourhop.wire.errors import ClientError, TransferError, Unavailable
from fourhop.wire.generate import (
    ChunkChoice,
    GenerateChunk,
    GenerateRequest,
    PromptTokensDetails,
    SamplingParams,
    Usage,
)
from fourhop.wire.logprobs import ChoiceLogprobs
from fourhop.wire.moments import Timeline
from fourhop.wire.ticket import HoldRequest, KVTicket, parse_transfer_params, verify
from fourhop.wire.worker import Leases, PrefixRequest, Role, WorkerInfo

log = logging.getLogger(__name__)

T = TypeVar("T")

ASK_TIMEOUT_S = 30.0
"""The longest step that a question to the loop waits for."""

ROLES: dict[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


class Engine:
    """One engine in this process. Made by `engine.open.open_engine`, which also ends it."""

    def __init__(
        self,
        loop: EngineLoop,
        info: WorkerInfo,
        limits: Limits,
        eos_token_ids: frozenset[int],
        transfer: KVTransferConfig | None,
        stall_timeout_s: float,
        grammars: Grammars | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self.loop = loop
        self._info = info
        self._eos_token_ids = eos_token_ids
        self._transfer = transfer
        self._stall_timeout_s = stall_timeout_s
        self._grammars = grammars
        self._wall_clock = wall_clock
        self._ids = itertools.count()
        self._seldom = Seldom(log)

    def info(self) -> WorkerInfo:
        """Who this engine is and how busy it is."""
        now = self.loop.occupancy
        return msgspec.structs.replace(
            self._info,
            num_free_blocks=now.num_free_blocks,
            num_held_blocks=now.num_held_blocks,
            num_running=now.num_running,
            num_waiting=now.num_waiting + now.num_loading,
        )

    def health(self) -> str | None:
        """Why this engine cannot make progress, or None when it can."""
        if self.loop.failure is not None:
            return self.loop.failure
        stalled_s = self.loop.jobs.clock() - self.loop.last_progress_s
        if self.loop.is_busy and stalled_s > self._stall_timeout_s:
            return f"no step has ended for {stalled_s:.0f} s although there is work"
        return None

    async def abort(self, ids: Iterable[str]) -> None:
        """End requests by their request id or ticket id; held blocks are freed."""
        self.loop.abort_named(ids)

    async def migrate(self, names: Iterable[str]) -> int:
        """End running requests with a ticket each, to be gone on with elsewhere; returns how many there were."""
        wanted = list(names)
        return await self._ask(lambda: self.loop.migrate(wanted))

    async def leases(self) -> Leases:
        """The tickets that this engine keeps blocks for."""
        return Leases(engine_id=self._info.engine_id, epoch=self._info.epoch, leases=await self._ask(self.loop.leases))

    async def renew(self, ticket_ids: list[str]) -> list[KVTicket]:
        """Begin new leases for tickets; returns those that are known."""
        return await self._ask(lambda: self.loop.renew(ticket_ids))

    async def hold_prefix(self, request: PrefixRequest) -> KVTicket | None:
        """A ticket for the KV that is still here of the longest beginning of some tokens."""
        check_token_ids(request.token_ids, self._info.vocab_size, "token_ids")
        sequence = Sequence(
            seq_id=next(self._ids),
            request_id=request.request_id,
            prompt_token_ids=request.token_ids,
            params=SamplingParams(),
            seed=0,
            max_tokens=1,
            eos_token_ids=self._eos_token_ids,
            cache_salt=request.cache_salt or "",
            hold=True,
        )
        return await self._ask(lambda: self.loop.hold_prefix(sequence))

    async def _ask(self, question: Callable[[], T]) -> T:
        """The answer of the loop's thread, given between two of its steps. Raises Unavailable when it has ended."""
        if self.loop.failure is not None:
            raise Unavailable(self.loop.failure)
        event_loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = event_loop.create_future()

        def settle(result: T) -> None:
            if not answer.done():
                answer.set_result(result)

        def ask() -> None:
            result = question()
            event_loop.call_soon_threadsafe(settle, result)

        self.loop.ask(ask)
        return await asyncio.wait_for(answer, ASK_TIMEOUT_S)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """See `TokenServer`. Raises ClientError for what cannot be served and TransferError for a bad ticket."""
        reason = self.health()
        if reason is not None:
            raise Unavailable(reason)
        check_request(request, self.limits)
        choices = split_choices(with_seed(request, lambda: secrets.randbits(63)))
        merged = merge_choices(
            [self._generate_one(choice) for choice in choices],
            prompt_first=request.sampling_params.prompt_logprobs is not None,
        )
        try:
            async for chunk in merged:
                yield chunk
        finally:
            await merged.aclose()

    async def _generate_one(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """One choice. Leaving early, by whatever way, aborts the sequence."""
        updates: asyncio.Queue[Update] = asyncio.Queue()
        event_loop = asyncio.get_running_loop()
        allowed = await self._allowed(request)
        job = self._job(request, allowed, lambda update: event_loop.call_soon_threadsafe(updates.put_nowait, update))
        self.loop.submit(job)
        ended = False
        first = True
        try:
            while not ended:
                update = await updates.get()
                ended = update.finish is not None or update.error is not None
                if update.error is not None:
                    raise update.error
                yield _chunk(request, update, is_first=first)
                first = False
            yield _usage_chunk(request, job.sequence)
        finally:
            if not ended:
                self.loop.abort([job.sequence.seq_id])

    async def _allowed(self, request: GenerateRequest) -> Allowed | None:
        """The tokens that the request's grammar allows; None if it has none. Compiled beside the event loop."""
        if request.sampling_params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise ClientError(f"{PARAM}: this engine has no vocabulary to enforce grammars with", param=PARAM)
        constraint = await asyncio.to_thread(self._grammars.constraint, request)
        return None if constraint is None else constraint.allowed

    def _job(self, request: GenerateRequest, allowed: Allowed | None, deliver: Callable[[Update], object]) -> Job:
        transfer = self._checked_transfer(request)
        hold = transfer if isinstance(transfer, HoldRequest) else None
        ticket = transfer if isinstance(transfer, KVTicket) else hold.prefix if hold is not None else None
        first_token = None
        output = list(request.output_token_ids)
        if hold is None and ticket is not None and ticket.first_token is not None and not output:
            output = [ticket.first_token.token_id]
            first_token = Update(ticket.first_token.token_id, ticket.first_token.logprob)
        params = resolve_max_tokens(request, self._info.max_model_len).sampling_params
        assert params.max_tokens is not None and params.seed is not None
        sequence = Sequence(
            seq_id=next(self._ids),
            request_id=request.request_id,
            prompt_token_ids=request.token_ids,
            output_token_ids=output,
            allowed=allowed,
            params=params,
            seed=params.seed,
            max_tokens=params.max_tokens,
            eos_token_ids=self._eos_token_ids,
            cache_salt=request.cache_salt or "",
            hold=hold is not None,
            ticket=ticket,
        )
        early = hold is not None and hold.early_ticket
        return Job(sequence, deliver, Timeline(self.loop.jobs.clock()), first_token, early)

    def _checked_transfer(self, request: GenerateRequest) -> HoldRequest | KVTicket | None:
        """The hand-over that the request asks for, verified; None if it is to be computed here."""
        transfer = parse_transfer_params(request.kv_transfer_params)
        if transfer is None:
            return None
        if self._transfer is None:
            raise ClientError(
                "this engine has no KV connector; start it with --kv-transfer-config", param="kv_transfer_params"
            )
        if isinstance(transfer, HoldRequest):
            # What is not computed here has no logits here.
            prefix = None if request.sampling_params.prompt_logprobs is not None else transfer.prefix
            is_help = prefix is not None and self._is_good(prefix, request, may_recompute=True)
            return transfer if is_help else msgspec.structs.replace(transfer, prefix=None)
        may_recompute = self._transfer.kv_load_failure_policy == "recompute"
        return transfer if self._is_good(transfer, request, may_recompute=may_recompute) else None

    def _is_good(self, ticket: KVTicket, request: GenerateRequest, *, may_recompute: bool) -> bool:
        """Whether a ticket verifies. If not, it is counted, and raised unless its tokens may be computed here."""
        try:
            self._verify(ticket, request)
        except TransferError as error:
            self._count_refusal(error.cause, recomputed=may_recompute)
            if not may_recompute:
                raise
            self._seldom.tell("bad_ticket", f"request {request.request_id}: {error}; computing it here")
            return False
        return True

    def _count_refusal(self, cause: str, *, recomputed: bool) -> None:
        """A ticket did not verify, so it never became a job's."""
        transfers = self.loop.transfers
        if transfers is not None:
            self.loop.ask(lambda: transfers.count_failure(cause, recomputed=recomputed))

    def _verify(self, ticket: KVTicket, request: GenerateRequest) -> None:
        assert self._transfer is not None
        if ticket.connector != self._info.connector:
            raise TransferError("connector", f"the ticket is for {ticket.connector}, we have {self._info.connector}")
        verify(
            ticket,
            fingerprint=self._info.fingerprint,
            token_ids=request.token_ids + request.output_token_ids,
            now_s=self._wall_clock(),
            secret=self._transfer.kv_connector_extra_config.secret,
        )
        listed = sum(len(group) for group in ticket.block_ids)
        if ticket.block_ids and listed != -(-ticket.num_tokens // self._info.block_size):
            raise TransferError("token_count", f"{listed} blocks are not those of {ticket.num_tokens} tokens")


def _chunk(request: GenerateRequest, update: Update, *, is_first: bool) -> GenerateChunk:
    choice = ChunkChoice(
        token_ids=[] if update.token_id is None else [update.token_id],
        finish_reason=None if update.finish is None else update.finish.reason,
        stop_reason=None if update.finish is None else update.finish.stop_reason,
        logprobs=None if update.logprob is None else ChoiceLogprobs([update.logprob]),
    )
    is_news = update.token_id is not None or update.finish is not None
    return GenerateChunk(
        request_id=request.request_id,
        choices=[choice] if is_news else [],
        kv_transfer_params=None if update.ticket is None else msgspec.to_builtins(update.ticket),
        moments=update.moments,
        prompt_token_ids=request.token_ids if is_first and request.return_token_ids else None,
        prompt_logprobs=update.prompt_logprobs,
    )


def _usage_chunk(request: GenerateRequest, sequence: Sequence) -> GenerateChunk:
    usage = Usage(
        prompt_tokens=sequence.num_prompt,
        completion_tokens=sequence.num_output,
        total_tokens=sequence.num_tokens,
        prompt_tokens_details=PromptTokensDetails(sequence.num_cached or 0),
    )
    return GenerateChunk(request_id=request.request_id, choices=[], usage=usage)
