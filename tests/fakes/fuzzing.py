"""Request bodies drawn from an OpenAPI description: mostly of the right shape, here and there of a wrong one."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Strategy = st.SearchStrategy[Any]

TEXTS = st.sampled_from(["", "a", "hi", "é👋", "</think>", "<tool_call>", '{"a": 1}', "\x00", "toy", "x" * 300])
NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 97, 257, 264, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308])
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=5
)

FUNCTION = st.fixed_dictionaries(
    {"name": TEXTS},
    optional={"arguments": st.sampled_from(['{"a": 1}', "{}", "", "{"]), "parameters": ANYTHING, "description": TEXTS},
)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "text", "text", "input_text", "image_url"]), "text": TEXTS}
)
MESSAGE = st.fixed_dictionaries(
    {
        "index": st.sampled_from([0, 0, 1, 300]),
        "output_mode": st.sampled_from(["tokens", "tokens", "text"]),
        "logprobs": st.sampled_from([None, None, True, 1]),
        "prompt_tokens": st.sampled_from([None, 3, [3], -1]),
        "created": st.just(1),
        "role": st.sampled_from(["user", "user", "user", "system", "assistant", "tool", "developer", "other"]),
        "content": st.one_of(TEXTS, TEXTS, st.none(), st.lists(PART, max_size=2)),
    },
    optional={
        "tool_calls": st.lists(st.fixed_dictionaries({"id": TEXTS, "function": FUNCTION}), max_size=2),
        "tool_call_id": TEXTS,
        "reasoning": TEXTS,
    },
)
IDS = st.lists(st.integers(0, 263), max_size=6)
KNOWN: dict[str, Strategy] = {
    "model": st.sampled_from([None, "toy", "", "other"]),
    "messages": st.lists(MESSAGE, min_size=1, max_size=3),
    "tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION}), max_size=2),
    "index": st.sampled_from([0, 0, 1, 300]),
    "output_mode": st.sampled_from(["tokens", "tokens", "text"]),
    "logprobs": st.sampled_from([None, None, True, 1]),
    "prompt_tokens": st.sampled_from([None, 3, [3], -1]),
    "created": st.just(1),
    "role": st.sampled_from(["user", "assistant", "system"]),
    "token_ids": IDS,
    "prompt_token_ids": st.one_of(st.none(), IDS, st.lists(IDS, max_size=2)),
    "prompt": st.one_of(TEXTS, IDS, st.lists(TEXTS, max_size=3)),
    "input": st.one_of(TEXTS, st.lists(st.one_of(MESSAGE, ANYTHING), max_size=3)),
    "max_tokens": st.sampled_from([1, 5, 20, 20, 20, 0, None, 5000]),
    "max_completion_tokens": st.sampled_from([1, 5, None]),
    "n": st.sampled_from([None, 1, 2, 0, 300]),
    "finish_reason": st.sampled_from([None, "stop", "length"]),
    "chat_template_kwargs": st.one_of(st.none(), st.dictionaries(TEXTS, SCALARS, max_size=2), ANYTHING),
}
"""What makes fields of these names meaningful; their types alone would be refused at once."""


def bodies(schema: dict[str, Any], components: dict[str, Any]) -> Strategy:
    """Bodies for one endpoint."""
    return st.one_of(_value(schema, components, 0), _value(schema, components, 0), ANYTHING)


def _value(schema: dict[str, Any], components: dict[str, Any], depth: int) -> Strategy:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return st.deferred(lambda: _value(components[name], components, depth + 1)) if depth < 8 else ANYTHING
    if "anyOf" in schema:
        return st.one_of(*(_value(each, components, depth) for each in schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    drawn: Strategy = _OF_TYPE.get(schema.get("type", ""), lambda *_: ANYTHING)(schema, components, depth)
    return drawn


def _object(schema: dict[str, Any], components: dict[str, Any], depth: int) -> Strategy:
    if "properties" not in schema:
        inner = schema.get("additionalProperties")
        values = _value(inner, components, depth + 1) if isinstance(inner, dict) else ANYTHING
        return st.dictionaries(st.one_of(TEXTS, st.sampled_from(["0", "5", "263", "264", "-1"])), values, max_size=2)
    fields = {name: _field(name, each, components, depth) for name, each in schema["properties"].items()}
    required = {name: fields.pop(name) for name in schema.get("required", []) if name in fields}
    return _some_of(required, fields)


@st.composite
def _some_of(draw: st.DrawFn, required: dict[str, Strategy], optional: dict[str, Strategy]) -> dict[str, Any]:
    """The required fields and a few of the others; now and then one has a value of any type."""
    names = draw(st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True)) if optional else []
    drawn = {name: draw(each) for name, each in {**required, **{name: optional[name] for name in names}}.items()}
    if drawn and draw(st.integers(0, 19)) == 0:
        drawn[draw(st.sampled_from(sorted(drawn)))] = draw(ANYTHING)
    return drawn


def _field(name: str, schema: dict[str, Any], components: dict[str, Any], depth: int) -> Strategy:
    if not schema or set(schema) == {"default"}:
        # A field of any type is mostly one that is known and refused.
        return KNOWN.get(name, st.one_of(st.none(), st.none(), st.none(), ANYTHING))
    own = _value(schema, components, depth + 1)
    return st.one_of(KNOWN[name], KNOWN[name], own) if name in KNOWN else own


def _array(schema: dict[str, Any], components: dict[str, Any], depth: int) -> Strategy:
    items = schema.get("items")
    return st.lists(_value(items, components, depth + 1) if isinstance(items, dict) else ANYTHING, max_size=3)


_OF_TYPE: dict[str, Any] = {
    "object": _object,
    "array": _array,
    "string": lambda *_: TEXTS,
    "integer": lambda *_: st.sampled_from([-1, 0, 1, 2, 7, 97, 263, 264, 2**40]),
    "number": lambda *_: NUMBERS,
    "boolean": lambda *_: st.booleans(),
    "null": lambda *_: st.none(),
}
