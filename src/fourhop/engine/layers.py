"""The decoder layers of Llama's family in fewer passes over memory: transformers' values to the last bit, in float32.

Transformers writes each step of a norm, a rotation or a sum to memory of its own. Here a norm is one operation, the
rotation reads queries and keys where the products left them, and sums and activations stay in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

Attention = Callable[..., tuple[torch.Tensor, None]]
"""transformers' attention interface."""

FAMILY = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
ACTIVATION = "silu"


class Rotation(torch.nn.Module):
    """The cosines and sines that `rotate` takes, [1, rows, 1, dim]; the sines of the first half are negated."""

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rotary(hidden, position_ids=position_ids)
        first, second = sin.chunk(2, dim=-1)
        return cos[:, :, None], torch.cat((-first, second), dim=-1)[:, :, None]


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of `heads`, [1, rows, heads, dim]. Source: Su et al., "RoFormer" (2021), eq. 34."""
    halves_swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return (heads * cos).add_(halves_swapped.mul_(sin))


class FusedLayer(torch.nn.Module):
    """Computes what `layer`, one of FAMILY, computes with `attention` and without a cache of transformers' own."""

    def __init__(self, layer: Any, attention: Attention, sliding_window: int | None) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp
        self._attention = attention
        self._sliding_window = sliding_window

    def forward(
        self, hidden: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], **options: Any
    ) -> torch.Tensor:
        hidden = self._attend(_norm(hidden, self.input_layernorm), position_embeddings, options).add_(hidden)
        normed, mlp = _norm(hidden, self.post_attention_layernorm), self.mlp
        gated = silu(mlp.gate_proj(normed), inplace=True).mul_(mlp.up_proj(normed))
        output: torch.Tensor = mlp.down_proj(gated).add_(hidden)
        return output

    def _attend(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], options: dict[str, Any]
    ) -> torch.Tensor:
        attention = self.self_attn
        rows = hidden.shape[:-1]
        query, key, value = (
            product(hidden).view(*rows, -1, attention.head_dim)
            for product in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            query, key = _norm(query, attention.q_norm), _norm(key, attention.k_norm)
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        options |= {"scaling": attention.scaling, "sliding_window": self._sliding_window}
        heads = (each.transpose(1, 2) for each in (query, key, value))
        attended, _ = self._attention(attention, *heads, **options)
        output: torch.Tensor = attention.o_proj(attended.reshape(*rows, -1))
        return output


def _norm(rows: torch.Tensor, norm: Any) -> torch.Tensor:
    return rms_norm(rows, norm.weight.shape, norm.weight, norm.variance_epsilon)


def fuse_layers(module: PreTrainedModel, attention: Attention, sliding_windows: tuple[int | None, ...]) -> None:
    """Replace all layers of a model of FAMILY; another model stays as it is."""
    body: Any = module.base_model
    kinds = {type(layer) for layer in getattr(body, "layers", ())}
    if not kinds or not kinds.issubset(FAMILY) or module.config.hidden_act != ACTIVATION:
        return
    pairs = zip(body.layers, sliding_windows, strict=True)
    body.layers = torch.nn.ModuleList(FusedLayer(layer, attention, window) for layer, window in pairs)
    body.rotary_emb = Rotation(body.rotary_emb)
