"""An engine without a model: real tickets and holds, tokens that any other stub engine would make too, and faults."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count

import msgspec

from fourhop.tokens.choices import merge_choices, split_choices, with_seed
from fourhop.tokens.limits import Limits, check_request, resolve_max_tokens
from fourhop.wire.errors import FourhopError, PeerError, TransferError
from fourhop.wire.generate import (
    ChunkChoice,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    PromptTokensDetails,
    Usage,
)
from fourhop.wire.ticket import FirstToken, HoldRequest, KVTicket, hash_tokens, parse_transfer_params, verify
from fourhop.wire.worker import Role, WorkerInfo

VOCAB_SIZE = 264
EOS = 257
WINDOW = 128
LIMITS = Limits(vocab_size=VOCAB_SIZE, max_model_len=WINDOW, max_num_choices=8, max_logprobs=20)


def next_token(request: GenerateRequest, output: list[int]) -> int:
    """The token that follows: a function of prompt, seed and position, as in a real engine. Never EOS."""
    text = f"{request.token_ids}{request.sampling_params.seed}{len(output)}"
    return hashlib.blake2b(text.encode(), digest_size=1).digest()[0]


@dataclass
class Fault:
    """What goes wrong with a request after it sent `after` tokens: an error, or without one it hangs."""

    after: int
    error: FourhopError | None


@dataclass
class StubEngine:
    """A TokenServer and its control endpoints. `faults` are used up, one by each request that comes in.

    `refusal` is the answer to every request and leaves the engine well; `ill` fails probes too. `eos_at` is the output
    position at which every request meets EOS. `peers` are the engines that tickets lead to.
    """

    name: str
    role: Role = "both"
    fingerprint: str = "weights-1"
    connector: str | None = "local"
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
    _ids: count[int] = field(default_factory=count)
    _stopped: set[str] = field(default_factory=set)

    async def check(self) -> WorkerInfo | None:
        if self.ill is not None:
            raise self.ill
        return self.info() if self.has_info else None

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            engine_id=self.name,
            epoch=self.epoch,
            model="toy",
            role=self.role,
            fingerprint=self.fingerprint,
            connector=self.connector,
            max_model_len=WINDOW,
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
        self.holds = {ticket: name for ticket, name in self.holds.items() if ticket not in ids and name not in ids}

    def is_idle(self) -> bool:
        return self.num_open == 0 and not self.holds

    def die(self) -> None:
        """The process is killed and started anew elsewhere: nothing is held, no probe succeeds."""
        self.ill = PeerError(f"cannot connect to {self.name}")
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
        merged = merge_choices([self._one(choice, fault) for choice in split_choices(request)])
        async with aclosing(merged) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _one(self, request: GenerateRequest, fault: Fault | None) -> AsyncGenerator[GenerateChunk, None]:
        transfer = parse_transfer_params(request.kv_transfer_params)
        output = list(request.output_token_ids)
        self.num_open += 1
        num_sent = 0
        try:
            if isinstance(transfer, KVTicket):
                await self._pull(transfer, request)
            finish = None
            while finish is None:
                await self._meet(fault, num_sent)
                token = EOS if len(output) == self.eos_at else next_token(request, output)
                output.append(token)
                num_sent += 1
                finish, stop_reason = self._finish(request, output, holds=isinstance(transfer, HoldRequest))
                if request.request_id in self._stopped:
                    finish, stop_reason = "abort", None
                ticket = None
                if finish == "length" and isinstance(transfer, HoldRequest):
                    ticket = self._hold(request, token)
                yield GenerateChunk(
                    request_id=request.request_id,
                    choices=[ChunkChoice(token_ids=[token], finish_reason=finish, stop_reason=stop_reason)],
                    kv_transfer_params=ticket,
                    moments=self._moments(transfer, finish) if num_sent == 1 or finish else None,
                )
            await self._meet(fault, num_sent)
            yield GenerateChunk(request_id=request.request_id, choices=[], usage=_usage(request, output))
        finally:
            self.num_open -= 1

    async def _meet(self, fault: Fault | None, num_sent: int) -> None:
        await asyncio.sleep(0)
        if fault is not None and fault.after == num_sent:
            if fault.error is not None:
                raise fault.error
            await asyncio.Event().wait()

    def _finish(
        self, request: GenerateRequest, output: list[int], *, holds: bool
    ) -> tuple[FinishReason | None, int | None]:
        params, token = request.sampling_params, output[-1]
        if len(output) > params.min_tokens and token == EOS and not params.ignore_eos:
            return "stop", None
        if token in params.stop_token_ids:
            return "stop", token
        return ("length", None) if holds or len(output) == params.max_tokens else (None, None)

    def _hold(self, request: GenerateRequest, token: int) -> dict[str, object]:
        ticket = KVTicket(
            ticket_id=f"{self.name}-ticket-{next(self._ids)}",
            connector=self.connector or "local",
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            token_hash=hash_tokens(request.token_ids),
            expires_at_s=self.now_s + 30,
            engine_id=self.name,
            request_id=request.request_id,
            host="127.0.0.1",
            port=1,
            num_tokens=len(request.token_ids),
            block_ids=[[0]],
            first_token=FirstToken(token),
        )
        self.holds[ticket.ticket_id] = request.request_id
        params: dict[str, object] = msgspec.to_builtins(ticket)
        return params | self.ticket_changes

    async def _pull(self, ticket: KVTicket, request: GenerateRequest) -> None:
        await asyncio.sleep(0)
        verify(ticket, fingerprint=self.fingerprint, token_ids=request.token_ids, now_s=self.now_s)
        producer = self.peers.get(ticket.engine_id)
        if producer is None or producer.ill is not None:
            raise TransferError("unreachable", f"no answer from {ticket.engine_id}")
        if producer.holds.pop(ticket.ticket_id, None) is None:
            raise TransferError("unknown_ticket", f"{ticket.engine_id} does not know {ticket.ticket_id}")
        self.num_pulled += 1

    @staticmethod
    def _moments(transfer: HoldRequest | KVTicket | None, finish: str | None) -> dict[str, float]:
        first = {"kv_requested": 0.001, "kv_ready": 0.003} if isinstance(transfer, KVTicket) else {}
        if not first:
            first = {"prefill_started": 0.001, "prefill_done": 0.004}
        return first if finish is None else {**first, "last_token": 0.009}


def _usage(request: GenerateRequest, output: list[int]) -> Usage:
    num_prompt = len(request.token_ids)
    return Usage(num_prompt, len(output), num_prompt + len(output), PromptTokensDetails(3))
