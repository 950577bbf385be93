"""The SSE codec: any cut of the bytes gives the same events."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourhop.wire.sse import DONE_EVENT, SSEDecoder, encode_event

STREAM = (
    encode_event('{"a":"é 中 👋"}'.encode())
    + b": ping\n\n"
    + b"event: x\nid: 7\ndata:{}\n\n"
    + b"data: one\ndata:  two\n\n"
    + b"data: crlf\r\n\r\n"
    + b"data: cr\r\r"
    + DONE_EVENT
)
EVENTS = ['{"a":"é 中 👋"}'.encode(), b"{}", b"one\n two", b"crlf", b"cr", b"[DONE]"]


def decode(chunks: list[bytes]) -> list[bytes]:
    decoder = SSEDecoder()
    events = [event for chunk in chunks for event in decoder.feed(chunk)]
    assert decoder.close()
    return events


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_a_cut_anywhere_changes_nothing(cut: int) -> None:
    assert decode([STREAM[:cut], STREAM[cut:]]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_chunking_changes_nothing(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert decode([STREAM[a:b] for a, b in itertools.pairwise(edges)]) == EVENTS


def test_byte_by_byte() -> None:
    assert decode([bytes([byte]) for byte in STREAM]) == EVENTS


@pytest.mark.parametrize("tail", [b"data: x", b"data: x\n", b"da"])
def test_a_stream_that_is_cut_inside_an_event_is_not_whole(tail: bytes) -> None:
    decoder = SSEDecoder()
    assert decoder.feed(encode_event(b"1") + tail) == [b"1"]
    assert not decoder.close()
