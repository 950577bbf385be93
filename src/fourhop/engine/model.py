"""Loads a model with transformers and asks it what its attention is like.

The facts that the KV pool needs (layers, heads, sizes, windows) are observed, not guessed from a config's key names:
one short forward pass runs through an attention function that records how each layer calls it. An architecture whose
state is not all in those calls is refused.
"""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from transformers import AttentionInterface, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from fourhop.engine.products import split_into_panels
from fourhop.engine.weights import Progress, digest, read_through, weight_files
from fourhop.kv.layout import LAYOUT_VERSION
from fourhop.wire.errors import StartError

PROBE = "fourhop_probe"

ROPE_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that change with the longest position in a batch: one sequence's keys would depend on another's."""

SCORE_CHANGES = ("softcap", "s_aux")
"""Options of transformers' attention interface that change the scores, which our attention does not do."""

NOT_IDENTITY = ("transformers_version", "dtype", "torch_dtype", "architectures")
"""Keys of config.json that do not change what is computed, beside those that begin with an underscore."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to compute, and what the engine needs to know of it.

    Attributes:
        module: In evaluation mode, on its device. With float32 weights on CPU its parameters are the mapped files.
        sliding_windows: For each layer, how many positions it sees, itself included; None is all.
        vocab_size: Rows of the input embedding: valid token ids are below it.
        eos_token_ids: Those of config.json and of generation_config.json together.
        weights: A digest of the weights (`weights.digest`) and of config.json.
    """

    module: PreTrainedModel
    architecture: str
    dtype: torch.dtype
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_windows: tuple[int | None, ...]
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]
    weights: str


def load_model(folder: Path, *, dtype: str, device: str, attention: str, progress: Progress) -> LoadedModel:
    """Load the checkpoint in `folder`; raises StartError, in one line, if it cannot be served.

    `dtype` is "auto" (float32 on CPU, else the checkpoint's own) or a torch dtype's name; `attention` is the name under
    which the attention function is registered with transformers; `progress` gets bytes of weights read and their total.
    """
    config = _read_config(folder)
    model_class = _model_class(config)
    files = weight_files(folder)
    identity = hashlib.sha256((digest(files) + _config_identity(folder)).encode()).hexdigest()
    read_through(files, progress)
    module = _load(folder, config, model_class, _dtype(dtype, device)).to(device).eval()
    if module.device.type == "cpu" and module.dtype == torch.float32:
        split_into_panels(module)
    probe = _probe(module)
    module.set_attn_implementation(attention)
    query, key = probe.layers[0].query_shape, probe.layers[0].key_shape
    return LoadedModel(
        module=module,
        architecture=model_class.__name__,
        dtype=module.dtype,
        num_layers=len(probe.layers),
        num_heads=query[1],
        num_kv_heads=key[1],
        head_dim=key[3],
        sliding_windows=tuple(layer.sliding_window for layer in probe.layers),
        vocab_size=module.get_input_embeddings().num_embeddings,
        max_position_embeddings=config.max_position_embeddings,
        eos_token_ids=_ids(config.eos_token_id) | _ids(module.generation_config.eos_token_id),
        weights=identity,
    )


def fingerprint(model: LoadedModel, *, block_size: int) -> str:
    """Equal for two engines exactly when the KV of one is valid in the other.

    Covers the weights' digest and config.json, the dtype of the KV, block size, layout version and geometry.
    """
    geometry = (model.num_layers, model.num_kv_heads, model.head_dim, block_size)
    text = f"{model.architecture} {model.weights} {model.dtype} {geometry} {LAYOUT_VERSION}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# Loading


def _read_config(folder: Path) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise StartError(f"{folder}/config.json: {_first_line(error)}") from None
    if getattr(config, "max_position_embeddings", None) is None:
        raise StartError(f"{folder}/config.json has no max_position_embeddings")
    return config


def _config_identity(folder: Path) -> str:
    config: dict[str, Any] = msgspec.json.decode((folder / "config.json").read_bytes())
    kept = {key: value for key, value in config.items() if not key.startswith("_") and key not in NOT_IDENTITY}
    return msgspec.json.encode(kept, order="deterministic").decode()


def _model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class for this config, refused when its state is not all in attention that goes through the interface."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise StartError(f"{config.model_type} is not a causal language model")
    model_class: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    name = model_class.__name__
    if model_class._is_stateful:
        raise StartError(f"{name} is not supported: it has recurrent state")
    if not model_class._supports_attention_backend:
        raise StartError(f"{name} is not supported: its attention cannot be replaced")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise StartError(f"{name} is not supported: it does not take position_ids")
    rope_types = _rope_types(getattr(config, "rope_parameters", None) or {})
    for rope_type in rope_types.intersection(ROPE_BY_LENGTH):
        raise StartError(f"{name} with {rope_type} rotary embeddings is not supported: they vary with the batch")
    return model_class


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    """The types in rope_parameters, which holds one set of parameters or one for each type of layer."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(each.get("rope_type", "default")) for each in nested or [parameters]}


def _dtype(name: str, device: str) -> torch.dtype | str:
    if name == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else "auto"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _load(
    folder: Path, config: PretrainedConfig, model_class: type[PreTrainedModel], dtype: torch.dtype | str
) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()
    try:
        module, report = model_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=PROBE,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (ImportError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise StartError(f"cannot load {folder}: {_first_line(error)}") from None
    for what in ("missing", "unexpected", "mismatched"):
        if names := report[f"{what}_keys"]:
            raise StartError(f"{folder}: {what} weights: {', '.join(sorted(map(str, names)))}")
    loaded: PreTrainedModel = module
    return loaded


def _ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


# The probe


@dataclass(frozen=True)
class _Layer:
    """One call of attention: query [1, heads, rows, dim], key and value [1, kv_heads, rows, dim]."""

    index: int
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    sliding_window: int | None
    changes: tuple[str, ...]


@dataclass
class _Probe:
    layers: list[_Layer] = field(default_factory=list)


def _record(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    probe: _Probe,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function that attends to nothing and notes how it was called."""
    changes = tuple(name for name in SCORE_CHANGES if options.get(name) is not None)
    probe.layers.append(
        _Layer(int(module.layer_idx), query.shape, key.shape, value.shape, sliding_window, changes)  # type: ignore[arg-type]
    )
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(PROBE, _record)


@torch.inference_mode()
def _probe(module: PreTrainedModel) -> _Probe:
    """Run two tokens through `module`, loaded with the recording attention. Raises StartError if it does not fit."""
    probe = _Probe()
    ids = torch.arange(2, device=module.device)[None]
    module(input_ids=ids, position_ids=ids, use_cache=False, probe=probe)
    name, layers = type(module).__name__, probe.layers
    if [layer.index for layer in layers] != list(range(module.config.num_hidden_layers)):
        raise StartError(f"{name} is not supported: not all of its layers are attention")
    if changes := {change for layer in layers for change in layer.changes}:
        raise StartError(f"{name} is not supported: its attention uses {', '.join(sorted(changes))}")
    if any(layer.key_shape != layer.value_shape or layer.key_shape != layers[0].key_shape for layer in layers):
        raise StartError(f"{name} is not supported: its keys and values are not all of one size")
    return probe
