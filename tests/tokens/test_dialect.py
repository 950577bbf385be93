"""Events that are read together are what they are when each is read alone."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourhop.tokens.completions import COMPLETIONS
from fourhop.tokens.dialect import GENERATE, Dialect, Event

PARTS = [
    b'{"choices":[{"token_ids":[1]}]}',
    b'{"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}',
    b'{"error":{"message":"no"}}',
    b'{"choices":[',  # with the next one they would be one value
    b"]}",
    b'{"choices":[]},{"choices":[]}',
    b'{"choices":[]}\n{"choices":[]}',
    b'{"choices":\n[]}',
    b"",
    b" ",
    b'{"choices":[]}\n',
    b'\xff"',
]


def singly(dialect: Dialect, several: list[bytes]) -> list[Event] | None:
    try:
        return [dialect.decode(one) for one in several]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=6))
def test_events_that_are_read_together_are_those_that_are_read_singly(several: list[bytes]) -> None:
    expected = singly(GENERATE, several)
    if expected is None:
        with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
            GENERATE.decode_all(several)
    else:
        assert GENERATE.decode_all(several) == expected


def test_completions_are_read_one_by_one() -> None:
    data = b'{"choices":[{"token_ids":[1],"finish_reason":"stop"}]}'
    assert COMPLETIONS.decode_all([data, data]) == [COMPLETIONS.decode(data)] * 2
