"""The set-ups of the posts that measured splitting, and smaller ones for a machine with two or three cores. Data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fourhop.checkpoint import DEFAULT_MODEL

PresetName = Literal["guide", "guide-small", "a100", "a100-small"]


@dataclass(frozen=True)
class Preset:
    """A comparison: `budgets` are the chunk budgets of the replicas, None the engine's default; lengths are tokens."""

    model: str
    num_prefill: int
    num_decode: int
    budgets: tuple[int | None, ...]
    num_input: int
    input_ratio: float
    num_output: int
    num_prompts: int
    rates: tuple[float, ...]
    limits: tuple[str, ...]
    engine_flags: str = ""


PRESETS: Mapping[PresetName, Preset] = {
    # Two L40S, 8k prompts, 100 requests a rate: one prefill and one decode engine against two replicas.
    "guide": Preset(
        model="Qwen/Qwen2.5-7B-Instruct",
        num_prefill=1,
        num_decode=1,
        budgets=(None, 1024, 512),
        num_input=8192,
        input_ratio=0.0,
        num_output=256,
        num_prompts=100,
        rates=(0.2, 0.4, 0.6, 0.8, 1.0),
        limits=("ttft:2000", "tpot:30"),
    ),
    # The same on two CPU cores: prompts of 512 to 1,024 tokens, 64 tokens of output.
    "guide-small": Preset(
        model=DEFAULT_MODEL,
        num_prefill=1,
        num_decode=1,
        budgets=(None, 512, 256, 128),
        num_input=768,
        input_ratio=1 / 3,
        num_output=64,
        num_prompts=30,
        rates=(0.05, 0.1, 0.15, 0.2, 0.3),
        limits=("ttft:15000", "tpot:200"),
    ),
    # Three A100: two prefill engines and one decode engine against three replicas; the post tells no output length.
    "a100": Preset(
        model="Qwen/Qwen3-4B-Instruct-2507",
        num_prefill=2,
        num_decode=1,
        budgets=(None, 512),
        num_input=3500,
        input_ratio=0.0,
        num_output=128,
        num_prompts=600,
        rates=(2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0),
        limits=("ttft:1000", "tpot:20"),
        engine_flags="--block-size 128",
    ),
    # The same on three CPU cores.
    "a100-small": Preset(
        model=DEFAULT_MODEL,
        num_prefill=2,
        num_decode=1,
        budgets=(None, 256),
        num_input=768,
        input_ratio=0.0,
        num_output=64,
        num_prompts=40,
        rates=(0.1, 0.2, 0.3, 0.4, 0.5),
        limits=("ttft:10000", "tpot:200"),
    ),
}
