"""`Run`: one choice of a request on its way: what was delivered, what it holds and what it met."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fourhop.router.ledger import Hold
from fourhop.router.policy import Placement, Reason
from fourhop.router.worker import Worker
from fourhop.tokens.ahead import Ahead
from fourhop.wire.errors import FourhopError
from fourhop.wire.generate import (
    ChunkChoice,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    PromptTokensDetails,
    Usage,
)
from fourhop.wire.logprobs import PromptLogprobs
from fourhop.wire.moments import Moment, Timeline

LegKind = Literal["whole", "prefill", "decode"]

TOLD: dict[LegKind, frozenset[str]] = {
    "prefill": frozenset({Moment.PREFILL_STARTED, Moment.PREFILL_DONE}),
    "decode": frozenset({Moment.KV_REQUESTED, Moment.KV_READY, Moment.DECODE_STARTED, Moment.LAST_TOKEN}),
    "whole": frozenset({Moment.PREFILL_STARTED, Moment.PREFILL_DONE, Moment.LAST_TOKEN}),
}
"""The moments that each kind of leg can tell of the request; a prefill engine's last token is not the request's."""


@dataclass(eq=False)
class Leg:
    """One engine's part of a run, counted at that engine until it is closed.

    `request` is what the engine is sent, under an id of ours. Its next `num_repeats` tokens are known already: it was
    sent before prefill had made them, so it makes them too. `has_begun` once it made a token that was not known.
    """

    kind: LegKind
    worker: Worker
    request: GenerateRequest
    sent_s: float
    chunks: AsyncGenerator[GenerateChunk, None] | Ahead[GenerateChunk]
    num_repeats: int = 0
    moments: dict[str, float] | None = None
    first_s: float | None = None
    num_new_tokens: int = 0
    busy_before_s: float = 0.0
    is_alone: bool = False
    has_begun: bool = False
    is_open: bool = True

    def __post_init__(self) -> None:
        self.worker.begin()

    @property
    def has_ticket(self) -> bool:
        return self.kind == "decode" and self.request.kv_transfer_params is not None

    @property
    def failure(self) -> BaseException | None:
        """What a leg that nobody reads yet met before its first chunk."""
        return self.chunks.failure if isinstance(self.chunks, Ahead) else None

    async def close(self) -> None:
        """Tell the engine to stop, if it has not ended."""
        if self.is_open:
            self.is_open = False
            self.worker.end()
            await self.chunks.aclose()


@dataclass(eq=False)
class Run:
    """`request` has one choice and a seed.

    `leg` is the one whose chunks are read, `ahead` the decode leg that is under way meanwhile. `has_ticket` while
    `hold` has one that was not pulled; `prefix` is a hold of the prompt's beginning at `holder`. `pages` are the hashes
    of the tokens so far (`prefixes`), each over `num_page_tokens`, `links` those of the prompt's blocks (`cacheindex`).
    `told` is what was decided and when, for who asks later (`history`), `without_kv` why the last ticket was given up.
    `leaves` is an engine that asked for the run to go on elsewhere, `wanted` the one that it shall go to.
    `announced` has a place for its prompt, `reserved` one for its stream.
    """

    request: GenerateRequest
    timeline: Timeline
    delivered: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    leg: Leg | None = None
    ahead: Leg | None = None
    reason: Reason | None = None
    prefill: str | None = None
    decode: str | None = None
    hold: Hold | None = None
    has_ticket: bool = False
    prefix: Hold | None = None
    num_prefix_tokens: int = 0
    holder: str | None = None
    pages: list[int] = field(default_factory=list)
    num_page_tokens: int = 0
    links: list[int] = field(default_factory=list)
    num_link_tokens: int = 0
    told: list[tuple[float, str]] = field(default_factory=list)
    without_kv: str = ""
    leaves: str | None = None
    wanted: str | None = None
    excluded: frozenset[str] = frozenset()
    num_retries: int = 0
    reserved: Worker | None = None
    announced: Worker | None = None
    is_late: bool = False
    forecast: Placement | None = None
    on_placed: Callable[[], None] | None = None
    error: FourhopError | None = None
    _details: PromptTokensDetails | None = None
    _has_begun: bool = False

    def leg_request(self, kind: LegKind, leg_id: str, transfer: dict[str, Any] | None) -> GenerateRequest:
        """What an engine is sent to go on from here: it continues after every token that was delivered.

        The leg that computes the prompt and gives the first token also tells of the prompt's log-probabilities.
        """
        params = self.request.sampling_params
        if kind == "prefill":
            params = msgspec.structs.replace(params, max_tokens=1)
        if params.prompt_logprobs is not None and (kind == "decode" or not self.owes_prompt_logprobs):
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(
            self.request,
            request_id=leg_id,
            sampling_params=params,
            output_token_ids=self.request.output_token_ids + self.delivered,
            kv_transfer_params=transfer,
            return_token_ids=None,
            model=None,
            priority=0,
            targets=None,
        )

    def deliver(
        self, leg: Leg, choice: ChunkChoice, prompt_logprobs: PromptLogprobs | None = None
    ) -> GenerateChunk | None:
        """Take in what an engine made; returns it as the client sees it, None if there is nothing to see.

        The end of a prefill leg, and that of a leg which goes on elsewhere, is not the client's.
        """
        self.delivered += choice.token_ids
        goes_on = choice.finish_reason == "migrated" or (leg.kind == "prefill" and choice.finish_reason == "length")
        if goes_on:
            choice = msgspec.structs.replace(choice, finish_reason=None)
        self.finish = choice.finish_reason
        if not choice.token_ids and self.finish is None:
            return None
        tells = not self._has_begun or self.finish is not None
        self._has_begun = True
        return GenerateChunk(
            request_id=self.request.request_id,
            choices=[choice],
            prompt_logprobs=prompt_logprobs,
            moments=self.timeline.since_received() if tells else None,
        )

    def note_moments(self, leg: Leg, moments: dict[str, float] | None) -> None:
        if moments:
            leg.moments = moments
            told = {name: after_s for name, after_s in moments.items() if name in TOLD[leg.kind]}
            self.timeline.merge(told, leg.sent_s)

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
    def owes_prompt_logprobs(self) -> bool:
        """True if the client waits for the prompt's log-probabilities, which come with the first token."""
        return self.request.sampling_params.prompt_logprobs is not None and not self.delivered

    @property
    def ticket(self) -> dict[str, Any] | None:
        """The transfer parameters to go on with, as new as they are; None without KV to pull."""
        return self.hold.ticket if self.has_ticket and self.hold is not None else None

    @property
    def place(self) -> str | None:
        """The decode engine that has a place for the run."""
        return None if self.reserved is None else self.reserved.name

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far; not to be changed."""
        output = self.request.output_token_ids + self.delivered
        return self.request.token_ids + output if output else self.request.token_ids

    @property
    def num_output(self) -> int:
        return len(self.request.output_token_ids) + len(self.delivered)

    @property
    def legs(self) -> list[Leg]:
        """What is open at engines."""
        return [leg for leg in (self.leg, self.ahead) if leg is not None and leg.is_open]
