"""Attention over the pool against attention over plain tensors, for every shape a batch can have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from fourhop.engine.attention import PagedKV, paged_attention
from fourhop.engine.batch import Batch, build_batch, context_runs
from fourhop.engine.sequence import Sequence
from fourhop.engine.step import Work
from fourhop.wire.generate import SamplingParams

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4


def make_sequence(seq_id: int, num_tokens: int, blocks: list[int]) -> Sequence:
    sequence = Sequence(seq_id, "r", list(range(num_tokens)), SamplingParams(), 0, 1, frozenset())
    sequence.blocks = blocks
    return sequence


def plain(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """[heads, tokens, dim] causal attention with repeated heads and an explicit mask."""
    positions = torch.arange(query.shape[1])
    seen = positions[None, :] <= positions[:, None]
    if window is not None:
        seen = seen & (positions[None, :] > positions[:, None] - window)
    repeat = HEADS // KV_HEADS
    return scaled_dot_product_attention(
        query, keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0), attn_mask=seen
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from([None, 3, 8]),
)
def test_any_chunking_over_any_blocks_is_plain_attention(
    lengths: list[tuple[int, int]], random: Any, window: int | None
) -> None:
    """Each sequence is computed in two parts, beside the others, over blocks in random order."""
    torch.manual_seed(0)
    planes = torch.zeros(2, 64 * BLOCK, KV_HEADS, DIM)
    free = list(range(64))
    random.shuffle(free)
    sequences, tensors = [], []
    for seq_id, (first, second) in enumerate(lengths):
        total = first + second
        sequences.append(make_sequence(seq_id, total, [free.pop() for _ in range(-(-total // BLOCK))]))
        tensors.append([torch.randn(heads, total, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)])
    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    for part in range(2):
        work = [
            Work(sequence, 0 if part == 0 else first, first if part == 0 else second, part == 1)
            for sequence, (first, second) in zip(sequences, lengths, strict=True)
        ]
        out = attend(planes, build_batch(work, BLOCK), work, tensors, window)
        for item in work:
            outputs[item.sequence.seq_id].append(out[: item.num_tokens])
            out = out[item.num_tokens :]
    for parts, (query, keys, values) in zip(outputs, tensors, strict=True):
        expected = plain(query, keys, values, window).transpose(0, 1)
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-5)


def attend(
    planes: torch.Tensor, batch: Batch, work: list[Work], tensors: list[list[torch.Tensor]], window: int | None
) -> torch.Tensor:
    def rows_of(which: int) -> torch.Tensor:
        parts = [tensors[item.sequence.seq_id][which][:, item.start : item.start + item.num_tokens] for item in work]
        return torch.cat(parts, 1)[None]

    paged = PagedKV(planes, torch.tensor(batch.slots), batch.spans)
    module: Any = SimpleNamespace(layer_idx=0)
    output, _ = paged_attention(module, rows_of(0), rows_of(1), rows_of(2), None, paged_kv=paged, sliding_window=window)
    return output[0]


@pytest.mark.parametrize("option", ["softcap", "s_aux"])
def test_variants_that_change_the_scores_are_refused(option: str) -> None:
    module: Any = SimpleNamespace(layer_idx=0)
    empty = torch.zeros(1, 1, 1, 1)
    paged = PagedKV(torch.zeros(2, 4, 1, 1), torch.tensor([0]), [])
    options: Any = {option: 1.0}
    with pytest.raises(NotImplementedError, match=option):
        paged_attention(module, empty, empty, empty, None, paged_kv=paged, **options)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=10, unique=True), st.integers(1, 40))
def test_runs_cover_the_tokens_in_order(blocks: list[int], num_tokens: int) -> None:
    num_tokens = min(num_tokens, len(blocks) * BLOCK)
    slots = [slot for first, length in context_runs(blocks, num_tokens, BLOCK) for slot in range(first, first + length)]
    assert slots == [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(num_tokens)]


def test_neighbouring_blocks_are_one_run() -> None:
    assert context_runs([3, 4, 5, 9], 4 * BLOCK, BLOCK) == [(12, 12), (36, 4)]


def test_a_batch_lists_rows_in_the_order_of_its_work() -> None:
    work = [Work(make_sequence(0, 6, [1, 2]), 4, 2, True), Work(make_sequence(1, 3, [0]), 0, 2, False)]
    batch = build_batch(work, BLOCK)
    assert (batch.token_ids, batch.positions) == ([4, 5, 0, 1], [4, 5, 0, 1])
    assert (batch.slots, batch.sample_rows) == ([8, 9, 0, 1], [1])
