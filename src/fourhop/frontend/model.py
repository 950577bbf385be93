"""What a frontend knows of the model it serves: its names, its window and its sampling defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fourhop.checkpoint import Checkpoint
from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.files import read_json, whole_number
from fourhop.wire.errors import NotFound, StartError


@dataclass(frozen=True)
class SamplingDefaults:
    """Values of generation_config.json for what a request leaves out. `max_tokens` None: the rest of the window."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


@dataclass(frozen=True)
class Model:
    """`names` are those that requests may use; the first is the one in answers. `eos_token_ids` end a text."""

    names: tuple[str, ...]
    max_model_len: int
    defaults: SamplingDefaults
    eos_token_ids: frozenset[int]

    @property
    def name(self) -> str:
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """Raises NotFound for a name that is not ours; none, or an empty one, means this model."""
        if name and name not in self.names:
            served = ", ".join(f"`{own}`" for own in self.names)
            raise NotFound(f"the model `{name[:200]}` does not exist; this server has {served}", param="model")


def load_model(checkpoint: Checkpoint, config: FrontendConfig) -> Model:
    """Read the checkpoint's configuration files. Raises StartError for what is missing or contradicts the config."""
    model_config = read_json(checkpoint.folder / "config.json")
    generation_config = read_json(checkpoint.folder / "generation_config.json", default={})
    return Model(
        names=config.served_model_name or (checkpoint.name,),
        max_model_len=_window(model_config, config.max_model_len),
        defaults=_defaults(generation_config),
        eos_token_ids=_eos_token_ids(generation_config, model_config),
    )


def _window(model_config: dict[str, Any], wanted: int | None) -> int:
    """`max_position_embeddings`, or fewer tokens if the operator wants so."""
    allowed = whole_number(model_config, "max_position_embeddings")
    if wanted is not None and allowed is not None and wanted > allowed:
        raise StartError(f"max_model_len {wanted} is more than the model's max_position_embeddings {allowed}")
    window = wanted or allowed
    if window is None:
        raise StartError("config.json has no max_position_embeddings; give max_model_len")
    return window


def _eos_token_ids(*configs: dict[str, Any]) -> frozenset[int]:
    """Those of all configurations together; each has one id, several or none."""
    values = [config.get("eos_token_id") for config in configs]
    lists = [value if isinstance(value, list) else [value] for value in values if value is not None]
    return frozenset(token_id for ids in lists for token_id in ids)


def _defaults(generation_config: dict[str, Any]) -> SamplingDefaults:
    own = SamplingDefaults()

    def value(name: str, default: Any) -> Any:
        given = generation_config.get(name)
        return default if given is None else given

    return SamplingDefaults(
        temperature=value("temperature", own.temperature),
        top_p=value("top_p", own.top_p),
        top_k=value("top_k", own.top_k),
        min_p=value("min_p", own.min_p),
        repetition_penalty=value("repetition_penalty", own.repetition_penalty),
        max_tokens=value("max_new_tokens", own.max_tokens),
    )
