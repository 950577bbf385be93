"""One sequence of tokens and its life in the engine.

The life is the table `NEXT`. "Prefill" and "decode" are not phases: a sequence that holds stops after one token and
keeps its blocks, a sequence with a ticket begins with blocks that are elsewhere, and everything between is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from fourhop.engine.blocks import extend_hashes, hash_block, root_hash
from fourhop.engine.grammar import Allowed
from fourhop.wire.generate import FinishReason, SamplingParams
from fourhop.wire.logprobs import PromptLogprob, PromptLogprobs
from fourhop.wire.ticket import KVTicket


class Phase(Enum):
    WAITING = "waiting"  # owns no blocks
    LOADING = "loading"  # owns blocks that a connector writes
    RUNNING = "running"  # owns blocks, computes
    HELD = "held"  # ended; its blocks wait to be pulled
    CLOSING = "closing"  # ended while loading; its blocks wait for the connector's last write
    FINISHED = "finished"  # owns nothing


NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.LOADING, Phase.RUNNING, Phase.HELD, Phase.FINISHED}),
    Phase.LOADING: frozenset({Phase.RUNNING, Phase.WAITING, Phase.CLOSING, Phase.FINISHED}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.HELD, Phase.FINISHED}),
    Phase.HELD: frozenset({Phase.FINISHED}),
    Phase.CLOSING: frozenset({Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


@dataclass(eq=False)
class Sequence:
    """Tokens, blocks and progress of one choice of one request.

    `token_ids` is prompt and output in one list. KV of the first `num_computed` tokens is in `blocks`; the rest is to
    be computed. `block_hashes` covers the full blocks whose tokens are known. `seq_id` is
    ours and unique, `request_id` the client's and not. `allowed` tells which tokens may follow an output so far, where
    the request asks for a structure. `held_as` is the ticket of a
    held sequence; an orphan is one whose ticket ended before it was computed, so there is nobody to hold it for.
    `prompt_logprobs` are those that are known so far, if they are asked for.
    """

    seq_id: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    eos_token_ids: frozenset[int]
    cache_salt: str = ""
    hold: bool = False
    ticket: KVTicket | None = None
    output_token_ids: list[int] = field(default_factory=list)
    allowed: Allowed | None = None
    phase: Phase = Phase.WAITING
    token_ids: list[int] = field(init=False)
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    num_named: int = 0
    num_cached: int | None = None
    held_as: str = ""
    is_orphan: bool = False
    prompt_logprobs: PromptLogprobs = field(default_factory=lambda: [None])

    def __post_init__(self) -> None:
        self.token_ids = self.prompt_token_ids + self.output_token_ids

    @property
    def has_hint(self) -> bool:
        """True if its ticket is for a part of its own prompt: without it, that part is computed."""
        return self.hold and self.ticket is not None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True until the whole prompt is computed, if its log-probabilities are asked for."""
        return self.params.prompt_logprobs is not None and not self.output_token_ids

    def note_prompt_logprobs(self, start: int, entries: list[dict[int, PromptLogprob]]) -> None:
        """Those of the prompt tokens after position `start`, perhaps not for the first time."""
        self.prompt_logprobs[start + 1 :] = entries

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """All of them, once: with the first token."""
        if self.params.prompt_logprobs is None or self.num_output != 1:
            return None
        taken, self.prompt_logprobs = self.prompt_logprobs, [None]
        return taken

    def enter(self, phase: Phase) -> None:
        """Go on to `phase`; an illegal step is our own bug."""
        if phase not in NEXT[self.phase]:
            raise RuntimeError(f"sequence {self.seq_id} cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)


def block_names(sequence: Sequence, num_tokens: int, block_size: int) -> list[bytes]:
    """A content hash for each block of the first `num_tokens` tokens, a partial last one included."""
    extend_hashes(sequence.block_hashes, sequence.token_ids, block_size, sequence.cache_salt)
    num_full = num_tokens // block_size
    names = sequence.block_hashes[:num_full]
    rest = sequence.token_ids[num_full * block_size : num_tokens]
    if rest:
        names.append(hash_block(names[-1] if names else root_hash(sequence.cache_salt), rest))
    return names


@dataclass(frozen=True)
class Finish:
    """Why a sequence ended. `stop_reason` is the stop token id, None for EOS."""

    reason: FinishReason
    stop_reason: int | None = None


def finish_of(sequence: Sequence, max_model_len: int) -> Finish | None:
    """How the sequence ends with its last output token, or None if it goes on."""
    token_id = sequence.output_token_ids[-1]
    if sequence.num_output >= sequence.params.min_tokens:
        if token_id in sequence.eos_token_ids and not sequence.params.ignore_eos:
            return Finish("stop")
        if token_id in sequence.params.stop_token_ids:
            return Finish("stop", token_id)
    if sequence.num_output >= sequence.max_tokens or sequence.num_tokens >= max_model_len:
        return Finish("length")
    return None
