"""What a step gives a sequence. Apart from the sampler: a model that needs no torch brings none in."""

from __future__ import annotations

from dataclasses import dataclass

from fourhop.wire.logprobs import TokenLogprob


@dataclass(frozen=True)
class Sampled:
    token_id: int
    logprob: TokenLogprob | None = None
