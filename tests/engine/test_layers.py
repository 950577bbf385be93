"""Fused layers give transformers' logits to the last bit; models that they do not fit stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fakes.models import FAMILIES, SIZES
from fakes.toy import VOCAB_SIZE
from fourhop.engine.layers import FusedLayer, fuse_layers


def make(family: str, **changes: Any) -> PreTrainedModel:
    config_class, model_class, own = FAMILIES[family]
    torch.manual_seed(0)
    model: Any = model_class(config_class(**{**SIZES, **own, **changes}))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)  # norms of one and biases of zero hide mistakes
    loaded: PreTrainedModel = model.eval()
    return loaded


def fuse(model: PreTrainedModel) -> None:
    fuse_layers(model, sdpa_attention_forward, (None,) * SIZES["num_hidden_layers"])


@torch.inference_mode()
def logits(model: Any, num_tokens: int) -> torch.Tensor:
    ids = torch.arange(3, 3 + num_tokens)[None] * 5 % VOCAB_SIZE
    result: torch.Tensor = model(input_ids=ids, position_ids=ids.sort().values, use_cache=False).logits
    return result


@pytest.mark.parametrize("num_tokens", [1, 7, 60])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, num_tokens: int) -> None:
    model = make(family)
    expected = logits(model, num_tokens)
    fuse(model)
    assert sum(type(module) is FusedLayer for module in model.modules()) == SIZES["num_hidden_layers"]
    assert torch.equal(logits(model, num_tokens), expected)


def test_attention_hears_of_each_layers_window() -> None:
    model, heard = make("qwen3"), []

    def attention(*args: Any, sliding_window: int | None, **options: Any) -> Any:
        heard.append(sliding_window)
        return sdpa_attention_forward(*args, **options)

    fuse_layers(model, attention, (None, 16, 8))
    logits(model, 4)
    assert heard == [None, 16, 8]


def test_another_activation_or_family_stays() -> None:
    models = [make("llama", hidden_act="gelu")]
    models.append(AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16)))
    for model in models:
        fuse(model)
        assert not any(type(module) is FusedLayer for module in model.modules())
