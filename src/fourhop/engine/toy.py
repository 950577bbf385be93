"""A model without weights, whose KV is the tokens themselves: anything that reads foreign or stale KV shows at once.

It lets the engine, the router and their faults be tested, and taught, in microseconds a token. A slot's value is a hash
of token and position; the next token is a function of all values that the context's slots hold.
"""

from __future__ import annotations

import hashlib

import numpy as np

from fourhop.engine.batch import Run, build_batch
from fourhop.engine.sampled import Computed, Sampled
from fourhop.engine.step import Work
from fourhop.kv.layout import BlockLayout, KVPool
from fourhop.wire.logprobs import PromptLogprob, PromptLogprobs

FIRST_TOKEN, NUM_TOKENS = 10, 97


def toy_layout(num_blocks: int, block_size: int = 4) -> BlockLayout:
    """One layer, one head, one 64-bit number for a token."""
    return BlockLayout(
        num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, itemsize=8, num_blocks=num_blocks
    )


def toy_output(prompt: list[int], num_tokens: int, seed: int = 0) -> list[int]:
    """What the toy model answers: the plain thing to compare with. A seed counts where the temperature is above 0."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(_choose([_value(token, at) for at, token in enumerate(tokens)], seed))
    return tokens[len(prompt) :]


def toy_prompt_logprobs(prompt: list[int]) -> PromptLogprobs:
    """What the toy model says of a prompt: a number made of each token and all before it."""
    values = [_value(token, at) for at, token in enumerate(prompt)]
    return [None, *(_judge(values[: at + 1], token) for at, token in enumerate(prompt[1:]))]


def _value(token_id: int, position: int) -> int:
    return (token_id * 1_000_003 + position * 7_919 + 1) % (1 << 62)


def _choose(values: list[int], seed: int = 0) -> int:
    digest = hashlib.blake2b(repr((seed, values)).encode(), digest_size=4).digest()
    return FIRST_TOKEN + int.from_bytes(digest, "little") % NUM_TOKENS


def _judge(values: list[int], token_id: int) -> dict[int, PromptLogprob]:
    return {token_id: PromptLogprob(-float(_choose(values, token_id)), 1)}


def _judge_prompt(item: Work, values: list[int]) -> list[dict[int, PromptLogprob]]:
    places = range(item.start, item.start + item.num_prompt_logits)
    return [_judge(values[: at + 1], item.sequence.token_ids[at + 1]) for at in places]


def _seed(item: Work) -> int:
    """What a draw would depend on besides the context: nothing when the likeliest token is taken."""
    return item.sequence.seed if item.sequence.params.temperature > 0 else 0


class ToyRunner:
    """A `ModelRunner` over a pool of `toy_layout`."""

    def __init__(self, pool: KVPool) -> None:
        self._block_size = pool.layout.block_size
        self._slots = pool.planes.reshape(pool.layout.num_planes, -1).view(np.int64)

    def run(self, work: list[Work]) -> Computed:
        batch = build_batch(work, self._block_size)
        for token_id, position, slot in zip(batch.token_ids, batch.positions, batch.slots, strict=True):
            self._slots[:, slot] = _value(token_id, position)
        contexts = [self._read(span.context_runs) for span in batch.spans]
        pairs = list(zip(work, contexts, strict=True))
        return Computed(
            {item.sequence.seq_id: Sampled(_choose(values, _seed(item))) for item, values in pairs if item.samples},
            {item.sequence.seq_id: _judge_prompt(item, values) for item, values in pairs if item.num_prompt_logits},
        )

    def stage_out(self, blocks: list[int]) -> None:
        """The pool is the only copy."""

    def stage_in(self, blocks: list[int]) -> None:
        """The pool is the only copy."""

    def _read(self, runs: list[Run]) -> list[int]:
        keys, values = (
            np.concatenate([plane[first : first + length] for first, length in runs]) for plane in self._slots
        )
        return [int(key) if key == value else -1 for key, value in zip(keys, values, strict=True)]
