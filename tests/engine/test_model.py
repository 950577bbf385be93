"""Loading: every family computes what transformers computes, facts are true, and what cannot be served is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fakes.models import FAMILIES, SIZES, SLIDING_WINDOW, write_tiny_checkpoint
from fakes.toy import EOS, IM_END, VOCAB_SIZE
from fourhop.engine.model import LoadedModel, fingerprint, load_model
from fourhop.wire.errors import StartError


def load(folder: Path, **options: Any) -> LoadedModel:
    options = {"dtype": "auto", "device": "cpu", "attention": "sdpa", "progress": lambda done, total: None, **options}
    return load_model(folder, **options)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, attention: str) -> None:
    write_tiny_checkpoint(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation=attention)
    ids = torch.arange(2 * SLIDING_WINDOW)[None] * 5 % VOCAB_SIZE
    with torch.inference_mode():
        expected = reference(ids).logits
        assert torch.equal(load(tmp_path, attention=attention).module(ids).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_are_those_of_the_config(tmp_path: Path, family: str) -> None:
    model = load(write_tiny_checkpoint(tmp_path, family))
    assert model.architecture == FAMILIES[family][1].__name__
    assert (model.num_layers, model.num_heads, model.num_kv_heads) == (3, 4, 2)
    assert model.head_dim == (24 if family == "qwen3" else 16)
    assert model.sliding_windows == (SLIDING_WINDOW if family == "mistral" else None,) * 3
    assert (model.vocab_size, model.max_position_embeddings) == (VOCAB_SIZE, SIZES["max_position_embeddings"])
    assert (model.dtype, model.module.training) == (torch.float32, False)


def test_windows_differ_by_layer_where_the_model_says_so(tmp_path: Path) -> None:
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    assert load(write_tiny_checkpoint(tmp_path, "qwen3", **windows)).sliding_windows == (None, 16, 16)


def test_eos_ids_of_both_configs_count(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama")
    edit_json(tmp_path / "generation_config.json", eos_token_id=[IM_END])
    assert load(tmp_path).eos_token_ids == {EOS, IM_END}
    edit_json(tmp_path / "generation_config.json", eos_token_id=None)
    edit_json(tmp_path / "config.json", eos_token_id=None)
    assert load(tmp_path).eos_token_ids == frozenset()


def test_dtype_on_request(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama")
    assert load(tmp_path, dtype="bfloat16").dtype == torch.bfloat16


def test_progress_counts_the_bytes_of_all_shards(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    seen: list[tuple[int, int]] = []
    load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    total = sum(shard.stat().st_size for shard in shards)
    assert seen[0] == (0, total) and seen[-1] == (total, total)
    assert seen == sorted(seen)


# The fingerprint


def test_fingerprint_is_equal_for_the_same_weights_however_they_are_stored(tmp_path: Path) -> None:
    one = load(write_tiny_checkpoint(tmp_path / "one", "llama"))
    two = load(write_tiny_checkpoint(tmp_path / "two", "llama", max_shard_size="100KB"))
    assert fingerprint(one, block_size=16) == fingerprint(two, block_size=16)


def test_fingerprint_tells_apart_what_makes_kv_differ(tmp_path: Path) -> None:
    base = write_tiny_checkpoint(tmp_path / "base", "llama")
    one_tensor = write_tiny_checkpoint(tmp_path / "one_tensor", "llama")
    weights = load_file(one_tensor / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"] *= 1.001
    save_file(weights, one_tensor / "model.safetensors", metadata={"format": "pt"})
    theta = {"rope_type": "default", "rope_theta": 500.0}
    models = [
        load(base),
        load(base, dtype="bfloat16"),
        load(one_tensor),
        load(write_tiny_checkpoint(tmp_path / "seed", "llama", seed=1)),
        load(write_tiny_checkpoint(tmp_path / "theta", "llama", rope_parameters=theta)),
        load(write_tiny_checkpoint(tmp_path / "family", "mistral", tie_word_embeddings=True)),
    ]
    found = [fingerprint(model, block_size=16) for model in models] + [fingerprint(models[0], block_size=8)]
    assert len(set(found)) == len(found)


# Refusals


def refusal(folder: Path) -> str:
    with pytest.raises(StartError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def rewrite_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace weights by name, dots written as double underscores; None removes one."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_wrong_weights_are_named(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama")
    rewrite_weights(tmp_path, model__norm__weight=torch.ones(63))
    assert "mismatched weights: " in refusal(tmp_path) and "model.norm.weight" in refusal(tmp_path)
    rewrite_weights(tmp_path, model__norm__weight=None)
    assert "missing weights: model.norm.weight" in refusal(tmp_path)
    rewrite_weights(tmp_path, model__norm__weight=torch.ones(64), model__extra__weight=torch.ones(2))
    assert "unexpected weights: model.extra.weight" in refusal(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    assert "is not a safetensors file" in refusal(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    assert "config.json" in refusal(tmp_path) and "nonesuch" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mamba"}, "MambaForCausalLM is not supported: it has recurrent state"),
        ({"model_type": "bloom"}, "BloomForCausalLM is not supported: its attention cannot be replaced"),
        ({"model_type": "t5"}, "t5 is not a causal language model"),
    ],
)
def test_unfit_architectures_are_named(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    write_tiny_checkpoint(tmp_path, "llama")
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    assert reason in refusal(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gemma2", {}, "Gemma2ForCausalLM is not supported: its attention uses softcap"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "not all of its layers are attention"),
        ("deepseek_v3", {"first_k_dense_replace": 3}, "its keys and values are not all of one size"),
    ],
)
def test_attention_that_ours_cannot_replace_is_found_by_the_probe(
    tmp_path: Path, model_type: str, changes: dict[str, Any], reason: str
) -> None:
    config = AutoConfig.for_model(model_type, **{**SIZES, "pad_token_id": 0, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert reason in refusal(tmp_path)


def test_rotary_embeddings_that_vary_with_the_batch_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert "dynamic rotary embeddings" in refusal(write_tiny_checkpoint(tmp_path, "llama", rope_parameters=rope))
