"""Reading the JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fourhop.wire.errors import StartError


def read_json(path: Path, *, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON object. Raises StartError when the file is missing and there is no default, or when it is broken."""
    if not path.is_file():
        if default is None:
            raise StartError(f"{path.parent.name} has no {path.name}")
        return default
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StartError(f"{path.parent.name}/{path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise StartError(f"{path.parent.name}/{path.name} is not a JSON object")
    return value


def whole_number(config: dict[str, Any], name: str) -> int | None:
    """A number of the model's config.json; of its text part if it has several parts."""
    value = config.get(name) or config.get("text_config", {}).get(name)
    return value if isinstance(value, int) else None
