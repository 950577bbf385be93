"""What an engine is told. One dataclass; the command line's flags derive from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EngineConfig:
    """An engine: sizes, limits and where it computes.

    Attributes:
        max_model_len: Longest sequence, prompt and output together. Default: what the model allows.
        max_num_batched_tokens: Token budget of one step: decodes first, prefill chunks fill the rest.
        max_handover_tokens: Token budget of a step that computes a prompt for another engine. Blocks travel from step
            to step, so decode waits for the last one's.
        max_num_seqs: Most sequences that compute at once.
        block_size: Tokens in one KV block.
        num_blocks: Blocks in the pool. Default: what kv_cache_bytes holds.
        kv_cache_bytes: Memory for the pool, in bytes.
        enable_prefix_caching: Reuse the blocks of earlier prompts with the same beginning.
        dtype: Of weights and KV. "auto" is float32 on CPU and the checkpoint's own on CUDA.
        device: "auto" takes CUDA where there is one.
        num_threads: Threads of one matrix product. Default: the cores this process may run on.
        max_logprobs: Most alternatives a request may ask for.
        stall_timeout_s: Health turns false when there is work and no step ends within this many seconds.
    """

    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_handover_tokens: int = 512
    max_num_seqs: int = 64
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int = 1 << 30
    enable_prefix_caching: bool = True
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: int | None = None
    max_logprobs: int = 20
    stall_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if self.stall_timeout_s <= 0:
            raise ValueError(f"stall_timeout_s must be positive, not {self.stall_timeout_s}")


LEAST = {
    "max_model_len": 2,
    "max_num_batched_tokens": 1,
    "max_handover_tokens": 1,
    "max_num_seqs": 1,
    "block_size": 1,
    "num_blocks": 2,
    "kv_cache_bytes": 1,
    "num_threads": 1,
    "max_logprobs": 0,
}
"""The smallest values that make an engine."""
