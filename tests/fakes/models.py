"""Tiny models with random weights: whole checkpoints of the families that the engine is tested with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fakes.toy import BOS, EOS, VOCAB_SIZE, write_toy_checkpoint

SLIDING_WINDOW = 24

FAMILIES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": SLIDING_WINDOW}),
}
"""Config, class and what sets the family apart here: tied embeddings, biases, a head_dim of its own, a window."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
"""Small, with grouped heads; weights large enough that the likeliest token stands out and depends on the context."""


def write_tiny_checkpoint(
    folder: Path, family: str, *, seed: int = 0, max_shard_size: str = "1GB", **changes: Any
) -> Path:
    """A checkpoint of `family`, weights drawn from `seed`, with the toy byte tokenizer; `changes` go to its config."""
    write_toy_checkpoint(folder)
    config_class, model_class, own = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**{**SIZES, **own, **changes}))
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
