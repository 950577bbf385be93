"""Jobs that are drawn: unique prompts, shared prefixes, conversations. Each follows from seed and place alone. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

from fourhop.bench.dataset_config import DatasetConfig
from fourhop.bench.workload import Job, Turn, Vocabulary, draw_ids

NUM_TURNS = 5
"""Of a conversation that is drawn, unless another number is given."""


def random_jobs(config: DatasetConfig, vocabulary: Vocabulary, seed: int) -> Iterator[Job]:
    """Prompts of exact lengths, without end: a common prefix if there is one, then tokens of their own."""
    prefix = draw_ids(vocabulary, f"{seed}/prefix", config.random_prefix_len)
    place = 0
    while True:
        num_input, num_output = _lengths(config, seed, place)
        yield Job((Turn([*prefix, *draw_ids(vocabulary, f"{seed}/prompt/{place}", num_input)], num_output),))
        place += 1


def prefix_repetition_jobs(config: DatasetConfig, vocabulary: Vocabulary, seed: int) -> Iterator[Job]:
    """Suffixes of their own behind prefixes that take turns, without end. Both lengths are exact."""
    prefixes = [
        draw_ids(vocabulary, f"{seed}/prefix/{number}", config.prefix_repetition_prefix_len)
        for number in range(config.prefix_repetition_num_prefixes)
    ]
    place = 0
    while True:
        suffix = draw_ids(vocabulary, f"{seed}/suffix/{place}", config.prefix_repetition_suffix_len)
        yield Job((Turn([*prefixes[place % len(prefixes)], *suffix], config.prefix_repetition_output_len),))
        place += 1


def multi_turn_jobs(config: DatasetConfig, vocabulary: Vocabulary, seed: int) -> Iterator[Job]:
    """Conversations, without end: a long first turn, short ones that follow the server's answers."""
    place = 0
    while True:
        num_first, num_output = _lengths(config, seed, place)
        lengths = [num_first] + [config.turn_input_len] * ((config.num_turns or NUM_TURNS) - 1)
        yield Job(
            tuple(
                Turn(draw_ids(vocabulary, f"{seed}/turn/{place}/{number}", length), num_output)
                for number, length in enumerate(lengths)
            )
        )
        place += 1


def _lengths(config: DatasetConfig, seed: int, place: int) -> tuple[int, int]:
    drawn, ratio = Random(f"{seed}/lengths/{place}"), config.random_range_ratio
    return (
        _between(drawn, config.random_input_len, ratio),
        _between(drawn, config.random_output_len, ratio),
    )


def _between(drawn: Random, length: int, ratio: float) -> int:
    """Uniform in [floor(length (1 - ratio)), ceil(length (1 + ratio))], at least one."""
    return max(1, drawn.randint(math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))))
