from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourhop.service.surrogates import lone_surrogate_path


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (rb'{"messages": [{"role": "user", "content": "x\ud83dy"}]}', "messages[0].content"),
        (rb'{"tools": [{"function": {"name": "\ude42"}}]}', "tools[0].function.name"),
        (rb'{"a": {"\ud83d": 1}}', "a"),
        (rb'["a", "\ud83d\ud83d"]', "[1]"),
        (rb'{"messages": [{"content": "\ud83d\ude42"}]}', None),
        (rb'{"text": "\ud83d', None),
        (b"\xff", None),
    ],
)
def test_where_a_lone_surrogate_is(body: bytes, path: str | None) -> None:
    """Case 16."""
    assert lone_surrogate_path(body) == path


@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_whole_characters_are_never_taken_for_one(value: object) -> None:
    assert lone_surrogate_path(json.dumps(value).encode()) is None
