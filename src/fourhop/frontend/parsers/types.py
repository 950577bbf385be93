"""The JSON types that a tool's schema declares for its arguments. Markup without types of its own needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_NAMES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def argument_types(tools: Sequence[Mapping[str, Any]], call: str, argument: str) -> frozenset[str]:
    """The types of one argument: of its `type`, its `enum` or `const`, and of all alternatives together.

    Empty when the tool is not known, has no such argument, or leaves its type open.
    """
    for tool in tools:
        function = _mapping(tool.get("function"))
        if function.get("name") == call:
            schema = _mapping(function.get("parameters"))
            declared = _mapping(schema.get("properties")).get(argument)
            return frozenset(_types(declared, schema))
    return frozenset()


def _types(schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """Looks at each part once, however often it is referred to."""
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        part = _mapping(waiting.pop())
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield from _own_types(part)
        waiting += [inner for name in _ALTERNATIVES for inner in _list(part.get(name))]
        waiting.append(_target(part, root))


def _own_types(part: Mapping[str, Any]) -> list[str]:
    if "type" in part:
        declared = part["type"]
        return [declared] if isinstance(declared, str) else [name for name in _list(declared) if isinstance(name, str)]
    values = [part["const"]] if "const" in part else _list(part.get("enum"))
    return [_NAMES[type(value)] for value in values]


def _target(part: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """What `$ref` points to inside the same schema."""
    reference = part.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for step in reference[2:].split("/"):
        found = _mapping(found).get(step.replace("~1", "/").replace("~0", "~"))
    return found


_NOTHING: Mapping[str, Any] = {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else _NOTHING


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
