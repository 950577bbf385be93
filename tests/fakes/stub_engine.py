"""An engine without a model: real tickets and holds, tokens that any other stub engine would make too, and faults."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from fourhop.tokens.choices import merge_choices, split_choices, with_seed
from fourhop.tokens.limits import Limits, check_request, resolve_max_tokens
from fourhop.tokens.worker import ServedModel
from fourhop.wire.errors import FourhopError, PeerError, PeerTimeout, TransferError
from fourhop.wire.generate import (
    ChunkChoice,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    PromptTokensDetails,
    SamplingParams,
    Usage,
)
from fourhop.wire.logprobs import PromptLogprob, PromptLogprobs
from fourhop.wire.ticket import FirstToken, HoldRequest, KVTicket, hash_tokens, parse_transfer_params, verify
from fourhop.wire.worker import Lease, Leases, PrefixRequest, Role, WorkerInfo

VOCAB_SIZE = 264
EOS = 257
WINDOW = 128
ANY = SamplingParams()
LIMITS = Limits(vocab_size=VOCAB_SIZE, max_model_len=WINDOW, max_num_choices=8, max_logprobs=20)


def next_token(request: GenerateRequest, output: list[int]) -> int:
    """The token that follows: a function of prompt, seed and position, as in a real engine. Never EOS."""
    text = f"{request.token_ids}{request.sampling_params.seed}{len(output)}"
    return hashlib.blake2b(text.encode(), digest_size=1).digest()[0]


def stub_prompt_logprobs(token_ids: list[int]) -> PromptLogprobs:
    """What a stub says of a prompt."""
    return [None, *({token_id: PromptLogprob(-token_id / 8, 1)} for token_id in token_ids[1:])]


@dataclass
class Fault:
    """What goes wrong with a request after it sent `after` tokens: an error, or without one it hangs.

    At -1 nothing was sent, not even an early ticket.
    """

    after: int
    error: FourhopError | None


@dataclass
class StubEngine:
    """A TokenServer and its control endpoints. `faults` are used up, one by each request that comes in.

    `refusal` is the answer to every request and leaves the engine well; `ill` fails probes too. `eos_at` is the output
    position at which every request meets EOS. `peers` are the engines that tickets lead to. It computes no token before
    `gate` is open, if there is one; `repeats_as` is what it makes of a first token that was pulled; it has the first
    `prefix_tokens` tokens of whatever it is asked for.
    """

    name: str
    engine_id: str = ""
    served: ServedModel | None = None
    role: Role = "both"
    model: str = "toy"
    fingerprint: str = "weights-1"
    connector: str | None = "local"
    window: int = WINDOW
    eos_at: int | None = None
    peers: dict[str, StubEngine] = field(default_factory=dict)
    faults: list[Fault | None] = field(default_factory=list)
    refusal: FourhopError | None = None
    ill: FourhopError | None = None
    has_info: bool = True
    abort_error: FourhopError | None = None
    requests: list[GenerateRequest] = field(default_factory=list)
    holds: dict[str, str] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    num_open: int = 0
    num_pulled: int = 0
    epoch: str = "epoch-1"
    now_s: float = 1000.0
    ticket_changes: dict[str, object] = field(default_factory=dict)
    gives_early_tickets: bool = True
    prefix_tokens: int = 0
    prefix_error: FourhopError | None = None
    prefix_gate: asyncio.Event | None = None
    pulls_prefixes: bool = True
    control_error: FourhopError | None = None
    migrate_error: FourhopError | None = None
    prefixes: list[PrefixRequest] = field(default_factory=list)
    renewed: list[str] = field(default_factory=list)
    repeats_as: int | None = None
    gate: asyncio.Event | None = None
    renewal_gate: asyncio.Event | None = None
    _tickets: dict[str, KVTicket] = field(default_factory=dict)
    _ids: count[int] = field(default_factory=count)
    _stopped: set[str] = field(default_factory=set)
    _moving: set[str] = field(default_factory=set)
    _whole: dict[str, asyncio.Future[FirstToken]] = field(default_factory=dict)
    _cuts: set[asyncio.Future[None]] = field(default_factory=set)

    @property
    def num_silent(self) -> int:
        """Requests that hang."""
        return len(self._cuts)

    async def check(self) -> WorkerInfo | None:
        if self.ill is not None:
            raise self.ill
        return self.info() if self.has_info else None

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            engine_id=self.name,
            epoch=self.epoch,
            model=self.model,
            role=self.role,
            fingerprint=self.fingerprint,
            connector=self.connector,
            max_model_len=self.window,
            vocab_size=VOCAB_SIZE,
            block_size=16,
            num_blocks=100,
            num_free_blocks=100 - len(self.holds),
            num_held_blocks=len(self.holds),
            num_running=self.num_open,
            num_waiting=0,
        )

    async def abort(self, ids: list[str]) -> None:
        if self.abort_error is not None:
            raise self.abort_error
        self.aborted += ids
        self._stopped.update(ids)
        for ticket_id in [ticket for ticket, name in self.holds.items() if ticket in ids or name in ids]:
            del self.holds[ticket_id]
            self._settle(ticket_id, None)

    async def refuse(self, transfer: dict[str, Any]) -> None:
        raise AssertionError("tickets are given back by name")

    async def leases(self) -> Leases:
        if self.control_error is not None:
            raise self.control_error
        leases = [
            Lease(ticket_id=ticket, request_id=name, num_tokens=1, num_blocks=1, expires_in_s=30.0)
            for ticket, name in self.holds.items()
        ]
        return Leases(engine_id=self.name, epoch=self.epoch, leases=leases)

    async def renew(self, ticket_ids: list[str]) -> list[KVTicket]:
        if self.control_error is not None:
            raise self.control_error
        if self.renewal_gate is not None:
            await self.renewal_gate.wait()
        self.renewed += ticket_ids
        known = [self._tickets[ticket_id] for ticket_id in ticket_ids if ticket_id in self.holds]
        return [msgspec.structs.replace(ticket, expires_at_s=self.now_s + 30) for ticket in known]

    async def hold_prefix(self, request: PrefixRequest) -> dict[str, Any] | None:
        self.prefixes.append(request)
        if self.prefix_gate is not None:
            await self.prefix_gate.wait()
        if self.prefix_error is not None:
            raise self.prefix_error
        if self.prefix_tokens == 0:
            return None
        held = GenerateRequest(
            request_id=request.request_id, token_ids=request.token_ids[: self.prefix_tokens], sampling_params=ANY
        )
        return self._publish(self._ticket(held, len(held.token_ids)), FirstToken(0))

    async def migrate(self, request_ids: list[str]) -> int:
        if self.migrate_error is not None:
            raise self.migrate_error
        self._moving.update(request_ids)
        return len(request_ids)

    def cut(self) -> None:
        for waiting in self._cuts:
            if not waiting.done():
                waiting.set_exception(PeerTimeout(f"timed out waiting to hear from {self.name}"))

    def is_idle(self) -> bool:
        return self.num_open == 0 and not self.holds

    def die(self) -> None:
        """The process is killed and started anew elsewhere: nothing is held, no probe succeeds."""
        self.ill = PeerError(f"cannot connect to {self.name}")
        for ticket_id in list(self.holds):
            self._settle(ticket_id, None)
        self.holds.clear()

    def restart(self) -> None:
        self.ill, self.epoch = None, f"epoch-{int(self.epoch[6:]) + 1}"

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        self.requests.append(request)
        fault = self.faults.pop(0) if self.faults else None
        if self.ill is not None or self.refusal is not None:
            raise self.ill or self.refusal or AssertionError
        check_request(request, LIMITS)
        request = resolve_max_tokens(with_seed(request, lambda: 4), WINDOW)
        merged = merge_choices(
            [self._one(choice, fault) for choice in split_choices(request)],
            prompt_first=request.sampling_params.prompt_logprobs is not None,
        )
        async with aclosing(merged) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _one(self, request: GenerateRequest, fault: Fault | None) -> AsyncGenerator[GenerateChunk, None]:
        transfer = parse_transfer_params(request.kv_transfer_params)
        output = list(request.output_token_ids)
        self.num_open += 1
        num_sent = 0
        early: KVTicket | None = None
        known: list[int] = []
        try:
            await self._meet(fault, -1)
            if isinstance(transfer, HoldRequest) and transfer.early_ticket and self.gives_early_tickets:
                early = self._ticket(request, len(request.token_ids))
                yield GenerateChunk(request_id=request.request_id, choices=[], kv_transfer_params=self._open(early))
            if isinstance(transfer, HoldRequest) and transfer.prefix is not None and self.pulls_prefixes:
                await self._pull(transfer.prefix, request)
            if isinstance(transfer, KVTicket):
                first = await self._pull(transfer, request)
                known = [] if output else [self.repeats_as or first.token_id]
            if self.gate is not None:
                await self.gate.wait()
            finish = None
            while finish is None:
                await self._meet(fault, num_sent)
                if request.request_id in self._moving:
                    yield self._moved(request, output)
                    break
                token = known.pop() if known else self._next(request, output)
                output.append(token)
                num_sent += 1
                finish, stop_reason = self._finish(request, output, holds=isinstance(transfer, HoldRequest))
                if request.request_id in self._stopped:
                    finish, stop_reason = "abort", None
                ticket = None
                if finish == "length" and isinstance(transfer, HoldRequest):
                    ticket = self._hold(early or self._ticket(request, len(request.token_ids)), token)
                    early = None
                yield GenerateChunk(
                    request_id=request.request_id,
                    choices=[ChunkChoice(token_ids=[token], finish_reason=finish, stop_reason=stop_reason)],
                    kv_transfer_params=ticket,
                    prompt_logprobs=_prompt_logprobs(request) if num_sent == 1 else None,
                    moments=self._moments(transfer, finish) if num_sent == 1 or finish else None,
                )
            await self._meet(fault, num_sent)
            yield GenerateChunk(request_id=request.request_id, choices=[], usage=_usage(request, output))
        finally:
            self.num_open -= 1
            if early is not None:
                self.holds.pop(early.ticket_id, None)
                self._settle(early.ticket_id, None)

    def _next(self, request: GenerateRequest, output: list[int]) -> int:
        return EOS if len(output) == self.eos_at else next_token(request, output)

    async def _meet(self, fault: Fault | None, num_sent: int) -> None:
        await asyncio.sleep(0)
        if fault is not None and fault.after == num_sent:
            if fault.error is not None:
                raise fault.error
            silence: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._cuts.add(silence)
            try:
                await silence
            finally:
                self._cuts.discard(silence)

    def _moved(self, request: GenerateRequest, output: list[int]) -> GenerateChunk:
        """The end of a stream that goes on elsewhere: a ticket for all tokens but the last."""
        self._moving.discard(request.request_id)
        ticket = None
        if output:
            ticket = self._publish(
                self._ticket(request, len(request.token_ids) + len(output) - 1, output), FirstToken(0)
            )
        return GenerateChunk(
            request_id=request.request_id,
            choices=[ChunkChoice(finish_reason="migrated")],
            kv_transfer_params=ticket,
        )

    def _finish(
        self, request: GenerateRequest, output: list[int], *, holds: bool
    ) -> tuple[FinishReason | None, int | None]:
        params, token = request.sampling_params, output[-1]
        if len(output) > params.min_tokens and token == EOS and not params.ignore_eos:
            return "stop", None
        if token in params.stop_token_ids:
            return "stop", token
        return ("length", None) if holds or len(output) == params.max_tokens else (None, None)

    def _ticket(self, request: GenerateRequest, num_tokens: int, output: list[int] | None = None) -> KVTicket:
        return KVTicket(
            ticket_id=f"{self.name}-ticket-{next(self._ids)}",
            connector=self.connector or "local",
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            token_hash=hash_tokens((request.token_ids + (output or []))[:num_tokens]),
            expires_at_s=self.now_s + 30,
            engine_id=self.name,
            request_id=request.request_id,
            host="127.0.0.1",
            port=1,
            num_tokens=num_tokens,
            block_ids=[],
        )

    def _open(self, ticket: KVTicket) -> dict[str, object]:
        """A ticket before there is anything to pull."""
        self.holds[ticket.ticket_id] = ticket.request_id
        self._tickets[ticket.ticket_id] = ticket
        self._whole[ticket.ticket_id] = asyncio.get_running_loop().create_future()
        params: dict[str, object] = msgspec.to_builtins(ticket)
        return params | self.ticket_changes

    def _hold(self, ticket: KVTicket, token: int) -> dict[str, object] | None:
        """The whole ticket; None if it was opened early and is not wanted any more."""
        if ticket.ticket_id in self._whole and ticket.ticket_id not in self.holds:
            self._settle(ticket.ticket_id, None)
            return None
        return self._publish(ticket, FirstToken(token))

    def _publish(self, ticket: KVTicket, first: FirstToken) -> dict[str, object]:
        params = (
            self._open(msgspec.structs.replace(ticket, first_token=first, block_ids=[[0]]))
            if (ticket.ticket_id not in self._whole)
            else msgspec.to_builtins(msgspec.structs.replace(ticket, block_ids=[[0]])) | self.ticket_changes
        )
        self._settle(ticket.ticket_id, first)
        return params

    def _settle(self, ticket_id: str, first: FirstToken | None) -> None:
        """All KV exists, or none ever will."""
        whole = self._whole.get(ticket_id)
        if whole is not None and not whole.done():
            if first is None:
                whole.cancel()
            else:
                whole.set_result(first)

    async def _pull(self, ticket: KVTicket, request: GenerateRequest) -> FirstToken:
        await asyncio.sleep(0)
        tokens = request.token_ids + request.output_token_ids
        verify(ticket, fingerprint=self.fingerprint, token_ids=tokens, now_s=self.now_s)
        producer = self.peers.get(ticket.engine_id)
        if producer is None or producer.ill is not None:
            raise TransferError("unreachable", f"no answer from {ticket.engine_id}")
        if ticket.ticket_id not in producer.holds:
            raise TransferError("unknown_ticket", f"{ticket.engine_id} does not know {ticket.ticket_id}")
        whole = producer._whole[ticket.ticket_id]
        try:
            await asyncio.wait([whole])
        finally:
            producer.holds.pop(ticket.ticket_id, None)
        if whole.cancelled():
            raise TransferError("withdrawn", f"{ticket.engine_id} gave {ticket.ticket_id} up")
        self.num_pulled += 1
        return whole.result()

    def _moments(self, transfer: HoldRequest | KVTicket | None, finish: str | None) -> dict[str, float]:
        pulled = {"kv_requested": 0.001, "kv_ready": 0.003}
        first = pulled if isinstance(transfer, KVTicket) else {"prefill_started": 0.001, "prefill_done": 0.004}
        if isinstance(transfer, HoldRequest) and transfer.prefix is not None and self.pulls_prefixes:
            first = pulled | first
        return first if finish is None else {**first, "last_token": 0.009}


def _usage(request: GenerateRequest, output: list[int]) -> Usage:
    num_prompt = len(request.token_ids)
    return Usage(num_prompt, len(output), num_prompt + len(output), PromptTokensDetails(3))


def _prompt_logprobs(request: GenerateRequest) -> PromptLogprobs | None:
    return None if request.sampling_params.prompt_logprobs is None else stub_prompt_logprobs(request.token_ids)
