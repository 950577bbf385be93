"""What a benchmark is told of its prompts. The names are those of `vllm bench serve` where they mean the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DatasetName = Literal["random", "prefix_repetition", "multi_turn", "sharegpt", "mooncake", "azure"]


@dataclass(frozen=True)
class DatasetConfig:
    """What the prompts are.

    Attributes:
        dataset_name: random: unique prompts of exact lengths. prefix_repetition: suffixes behind a few prefixes.
            multi_turn: conversations whose turns follow the server's own answers. sharegpt, mooncake, azure: files.
        dataset_path: The file: ShareGPT's JSON, Mooncake's JSON lines, or Azure's LLM trace as CSV.
        random_input_len: Tokens in a prompt; in a conversation, in its first turn.
        random_output_len: Tokens in an answer.
        random_range_ratio: Lengths are uniform between (1 - ratio) and (1 + ratio) times the given ones.
        random_prefix_len: Tokens that all prompts of `random` begin with, before those of their own.
        prefix_repetition_prefix_len: Tokens in a shared prefix.
        prefix_repetition_suffix_len: Tokens after it.
        prefix_repetition_num_prefixes: Different prefixes.
        prefix_repetition_output_len: Tokens in an answer.
        num_turns: Turns in a conversation of `multi_turn`, 5 unless given; most turns taken of one of `sharegpt`, 1
            unless given.
        turn_input_len: New tokens in each later turn of `multi_turn`.
        think_time_s: Between an answer and the conversation's next turn.
        sharegpt_output_len: Tokens in an answer. Default: as many as the file's own.
        length_scale: Lengths of a trace are multiplied by this, and so is the size of its shared blocks.
        time_scale: Times of a trace are multiplied by this.
    """

    dataset_name: DatasetName = "random"
    dataset_path: Path | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    num_turns: int | None = None
    turn_input_len: int = 64
    think_time_s: float = 0.0
    sharegpt_output_len: int | None = None
    length_scale: float = 1.0
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if (self.dataset_path is None) == self.is_file:
            needs = "needs" if self.is_file else "takes no"
            raise ValueError(f"the dataset {self.dataset_name} {needs} dataset_path")
        if not 0 <= self.random_range_ratio < 1:
            raise ValueError(f"random_range_ratio must be at least 0 and less than 1, not {self.random_range_ratio}")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("random_prefix_len", "prefix_repetition_prefix_len", "think_time_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        for name in ("length_scale", "time_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive number, not {getattr(self, name)}")

    @property
    def is_file(self) -> bool:
        return self.dataset_name in ("sharegpt", "mooncake", "azure")

    @property
    def shares_prefixes(self) -> bool:
        """Prompts share beginnings on purpose, so that cache hits are wanted."""
        shared = ("prefix_repetition", "multi_turn", "mooncake")
        return self.dataset_name in shared or self.random_prefix_len > 0 or (self.num_turns or 1) > 1


_AT_LEAST_ONE = (
    "random_input_len",
    "random_output_len",
    "prefix_repetition_suffix_len",
    "prefix_repetition_num_prefixes",
    "prefix_repetition_output_len",
    "num_turns",
    "turn_input_len",
    "sharegpt_output_len",
)
