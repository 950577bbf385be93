"""Token log-probabilities as vLLM 0.32 writes them, of what was generated and of the prompt."""

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


class PromptLogprob(msgspec.Struct, frozen=True, gc=False):
    """How likely a token was at its place in the prompt. `decoded_token` is its text, where there is a tokenizer."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""One entry for each prompt token: None for the first, then by id the prompt's own token and the likeliest ones."""


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
