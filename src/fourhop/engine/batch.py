"""A step's work as flat arrays: every sequence's tokens one after another, without padding."""

from __future__ import annotations

from dataclasses import dataclass

from fourhop.engine.step import Work

Run = tuple[int, int]
"""Neighbouring slots (first, length): slot `block · block_size + offset` holds one token's keys and values."""


@dataclass(frozen=True)
class Span:
    """One sequence's rows in the batch, and where its context lies.

    Rows `first_row … first_row + num_tokens` are the tokens from position `start`; they attend to `start + num_tokens`
    tokens of context, which `context_runs` lists in order.
    """

    first_row: int
    num_tokens: int
    start: int
    context_runs: list[Run]


@dataclass(frozen=True)
class Batch:
    """`token_ids`, `positions` and `slots` have one entry per row.

    The logits that matter are those of `sample_rows`, and of `prompt_rows` for the prompt tokens that follow them.
    """

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    spans: list[Span]
    sample_rows: list[int]
    prompt_rows: list[int]


def build_batch(work: list[Work], block_size: int) -> Batch:
    """Flatten a step. Rows follow the order of `work`; sampled and prompt rows too."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[Span] = []
    sample_rows: list[int] = []
    prompt_rows: list[int] = []
    for item in work:
        first, end = len(token_ids), item.start + item.num_tokens
        blocks = item.sequence.blocks
        spans.append(Span(first, item.num_tokens, item.start, context_runs(blocks, end, block_size)))
        token_ids += item.sequence.token_ids[item.start : end]
        positions += range(item.start, end)
        slots += (blocks[at // block_size] * block_size + at % block_size for at in range(item.start, end))
        prompt_rows += range(first, first + item.num_prompt_logits)
        if item.samples:
            sample_rows.append(len(token_ids) - 1)
    return Batch(token_ids, positions, slots, spans, sample_rows, prompt_rows)


def context_runs(blocks: list[int], num_tokens: int, block_size: int) -> list[Run]:
    """The slots of the first `num_tokens` tokens as runs of neighbours."""
    runs: list[Run] = []
    left = num_tokens
    for block in blocks[: -(-num_tokens // block_size)]:
        first, length = block * block_size, min(block_size, left)
        left -= length
        if runs and runs[-1][0] + runs[-1][1] == first:
            runs[-1] = (runs[-1][0], runs[-1][1] + length)
        else:
            runs.append((first, length))
    return runs
