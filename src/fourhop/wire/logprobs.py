"""Token log-probabilities as vLLM's generate endpoint writes them: ids, not text."""

from __future__ import annotations

import msgspec

# Without `gc`: there are thousands in one answer, none can be part of a cycle, and looking for cycles takes longer than
# making them.


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprob: float
    rank: int | None = None


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """One generated token. `rank` is 1 for the likeliest; minus infinity is written as -9999.0 with rank None."""

    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: list[TopLogprob] = []


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
