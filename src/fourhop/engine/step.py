"""What one step computes, as the scheduler says it and the loop does it, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass, field

from fourhop.engine.sequence import Sequence


@dataclass(frozen=True)
class Limits:
    """What bounds a step and a sequence."""

    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    prefix_caching: bool
    max_handover_tokens: int
    max_prompt_logits: int = 256


@dataclass(frozen=True)
class Work:
    """Compute `num_tokens` tokens of a sequence from `start`; `samples` when that reaches its last token."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool

    @property
    def num_prompt_logits(self) -> int:
        """How many of its tokens have another prompt token after them whose log-probability is asked for."""
        wants = self.sequence.wants_prompt_logprobs
        return max(0, min(self.num_tokens, self.sequence.num_prompt - 1 - self.start)) if wants else 0


@dataclass(frozen=True)
class Load:
    """Pull the ticket's blocks after the first `skip_blocks` into `block_ids`."""

    sequence: Sequence
    block_ids: list[int]
    skip_blocks: int


@dataclass
class Step:
    """What the loop does next. `preempted` went back to waiting."""

    work: list[Work] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_prompt_logits: int = 0
    hands_over: bool = False

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        samples = num_tokens == sequence.num_uncomputed
        self.work.append(Work(sequence, sequence.num_computed, num_tokens, samples))
        self.num_tokens += num_tokens
        self.num_prefill_tokens += num_tokens if num_tokens > 1 else 0
        self.num_prompt_logits += self.work[-1].num_prompt_logits
        self.hands_over |= sequence.hold
