"""Token log-probabilities as vLLM's generate endpoint writes them: ids, not text."""

from __future__ import annotations

import msgspec


class TopLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    rank: int | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """One generated token. `rank` is 1 for the likeliest; minus infinity is written as -9999.0 with rank None."""

    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: list[TopLogprob] = []


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
