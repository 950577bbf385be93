"""Finding half a surrogate pair in a JSON body: legal JSON, but no text that can be encoded or tokenized."""

from __future__ import annotations

import json
import re
from typing import Any

_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")


def lone_surrogate_path(body: bytes) -> str | None:
    """The path of a text, or of an object whose key, holds one: "messages[0].content". None if there is none."""
    if not _ESCAPED.search(body):
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, str) and _is_broken(value):
            return path
        if isinstance(value, dict):
            if any(_is_broken(key) for key in value):
                return path
            pending += [(f"{path}.{key}".lstrip("."), item) for key, item in value.items()]
        elif isinstance(value, list):
            pending += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    return None


def _is_broken(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
