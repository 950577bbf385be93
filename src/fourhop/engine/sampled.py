"""What a step gives a sequence. Apart from the sampler: a model that needs no torch brings none in."""

from __future__ import annotations

from dataclasses import dataclass, field

from fourhop.wire.logprobs import PromptLogprob, TokenLogprob


@dataclass(frozen=True)
class Sampled:
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class Computed:
    """What a step gave, by sequence id.

    Attributes:
        sampled: The token of each sequence that reached its last one; None where no token can be chosen.
        prompt_logprobs: Where they are asked for, an entry for each prompt token that follows one of the step's.
    """

    sampled: dict[int, Sampled | None]
    prompt_logprobs: dict[int, list[dict[int, PromptLogprob]]] = field(default_factory=dict)
