"""`Run`: one choice of a request on its way: what was delivered, what it holds and what it met."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fourhop.router.fleet import Worker
from fourhop.router.ledger import Hold
from fourhop.router.policy import Reason
from fourhop.wire.errors import FourhopError
from fourhop.wire.generate import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    PromptTokensDetails,
    Usage,
)
from fourhop.wire.moments import Moment, Timeline

LegKind = Literal["whole", "prefill", "decode"]

TOLD: dict[LegKind, frozenset[str]] = {
    "prefill": frozenset({Moment.PREFILL_STARTED, Moment.PREFILL_DONE}),
    "decode": frozenset({Moment.KV_REQUESTED, Moment.KV_READY, Moment.LAST_TOKEN}),
    "whole": frozenset({Moment.PREFILL_STARTED, Moment.PREFILL_DONE, Moment.LAST_TOKEN}),
}
"""The moments that each kind of leg can tell of the request; a prefill engine's last token is not the request's."""


@dataclass(frozen=True)
class Leg:
    """One engine's part of a run. `request` is what that engine is sent, under an id of its own."""

    kind: LegKind
    worker: Worker
    request: GenerateRequest
    sent_s: float

    @property
    def has_ticket(self) -> bool:
        return self.kind == "decode" and self.request.kv_transfer_params is not None


@dataclass(eq=False)
class Run:
    """`request` has one choice and a seed. `ticket` is the transfer parameters of a hold that was not yet pulled."""

    request: GenerateRequest
    timeline: Timeline
    delivered: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    leg: Leg | None = None
    reason: Reason | None = None
    prefill: str | None = None
    decode: str | None = None
    hold: Hold | None = None
    ticket: dict[str, Any] | None = None
    excluded: frozenset[str] = frozenset()
    num_retries: int = 0
    error: FourhopError | None = None
    _details: PromptTokensDetails | None = None
    _has_begun: bool = False

    def leg_request(self, leg_id: str, *, max_tokens: int | None, transfer: dict[str, Any] | None) -> GenerateRequest:
        """What an engine is sent to go on from here: it continues after every token that was delivered."""
        params = self.request.sampling_params
        if max_tokens is not None:
            params = msgspec.structs.replace(params, max_tokens=max_tokens)
        return msgspec.structs.replace(
            self.request,
            request_id=leg_id,
            sampling_params=params,
            output_token_ids=self.request.output_token_ids + self.delivered,
            kv_transfer_params=transfer,
            return_token_ids=None,
            model=None,
        )

    def deliver(self, leg: Leg, chunk: GenerateChunk) -> GenerateChunk:
        """Take in an engine's chunk; returns it as the client sees it. A prefill leg's own end is not the client's."""
        choice = chunk.choices[0]
        self.delivered += choice.token_ids
        if leg.kind == "prefill" and choice.finish_reason == "length":
            choice = msgspec.structs.replace(choice, finish_reason=None)
        self.finish = choice.finish_reason
        if chunk.moments:
            told = {name: after_s for name, after_s in chunk.moments.items() if name in TOLD[leg.kind]}
            self.timeline.merge(told, leg.sent_s)
        tells = not self._has_begun or self.finish is not None
        self._has_begun = True
        return GenerateChunk(
            request_id=self.request.request_id,
            choices=[choice],
            moments=self.timeline.since_received() if tells else None,
        )

    def note_usage(self, usage: Usage | None) -> None:
        """The first leg with a usage knows how much of the prompt was cached; a decode leg's cache is the transfer."""
        if self._details is None and usage is not None:
            self._details = usage.prompt_tokens_details

    def usage_chunk(self) -> GenerateChunk:
        num_prompt = len(self.request.token_ids)
        return GenerateChunk(
            request_id=self.request.request_id,
            choices=[],
            usage=Usage(num_prompt, self.num_output, num_prompt + self.num_output, self._details),
            moments=self.timeline.since_received(),
        )

    @property
    def num_output(self) -> int:
        return len(self.request.output_token_ids) + len(self.delivered)
