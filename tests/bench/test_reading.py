"""From bytes, cut anywhere, to times and numbers: cases 86, 88, 89 and 92."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.scripted_server import DONE, chat, event, text, tokens, usage
from fourhop.bench.reading import Reading

ANSWER = b"".join([text(" he\u00e9"), text(" llo  ", "length"), usage(3, 2), DONE])
"""Three events and the end: two of text, with spaces to lose and a character of two bytes."""


def estimate(said: str) -> int:
    return len(said.split())


def read(*reads: bytes) -> Reading:
    """Each read arrives one second after the one before, the first at 1; the stream ends with the last."""
    reading = Reading()
    for at_s, data in enumerate(reads, 1):
        reading.feed(data, float(at_s))
    reading.close(float(len(reads)))
    return reading


def is_right(reading: Reading) -> bool:
    return (reading.failure, reading.text, reading.said(estimate)) == (None, " he\u00e9 llo  ", {"usage": 2})


@pytest.mark.parametrize("cut", range(1, len(ANSWER)))
def test_a_stream_may_be_cut_at_any_byte(cut: int) -> None:
    assert is_right(read(ANSWER[:cut], ANSWER[cut:]))


@given(st.lists(st.integers(0, len(ANSWER)), max_size=12))
def test_a_stream_may_be_cut_anywhere(places: list[int]) -> None:
    cuts = [0, *sorted(places), len(ANSWER)]
    assert is_right(read(*(ANSWER[a:b] for a, b in pairwise(cuts))))


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER,
        ANSWER.replace(b"data: ", b"data:"),
        ANSWER.replace(b"\n", b"\r\n"),
        b": ping\n\n" + ANSWER.replace(b"data: ", b": ping\nevent: message\nid: 7\nretry: 1\ndata: "),
        ANSWER.replace(b'"choices": ', b'"choices":\ndata: ', 1),
        ANSWER[:-1],
        ANSWER.removesuffix(DONE),
        ANSWER.removesuffix(b"\n" + DONE),
    ],
    ids=["one read", "no space", "CRLF", "other fields", "two data lines", "no last blank", "no end", "cut end"],
)
def test_every_valid_form_of_a_stream_reads_the_same(answer: bytes) -> None:
    assert is_right(read(answer))
    assert is_right(read(*(bytes([byte]) for byte in answer)))


def test_a_time_stamp_is_that_of_the_byte_that_completes_the_event() -> None:
    first, second = tokens(1), tokens(2, finish="length")
    assert list(read(first[:-1], first[-1:] + second[:5], second[5:]).chunk_at_s) == [2.0, 3.0]
    assert list(read(first + second).chunk_at_s) == [1.0, 1.0]


def test_a_chunk_may_hold_several_tokens() -> None:
    reading = read(tokens(1), tokens(2, 3, 4, 5), tokens(6, 7, 8, 9, finish="length"), usage(3, 9), DONE)
    assert reading.said(estimate) == {"ids": 9, "usage": 9}
    assert reading.place_tokens(9, "ids") == array("L", [1, 4, 4])


def test_a_first_event_that_only_names_the_role_is_not_the_first_token() -> None:
    reading = read(chat(role="assistant", content=""), chat(content="a"), chat(content="b", finish="length"))
    assert list(reading.chunk_at_s) == [2.0, 3.0]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thinking_is_output(name: str) -> None:
    reading = read(chat(role="assistant"), chat(**{name: "hm"}), chat(content="b", finish="stop"))
    assert list(reading.chunk_at_s) == [2.0, 3.0]
    assert reading.text == "hmb"


def test_a_piece_of_a_call_is_output() -> None:
    call = {"index": 0, "function": {"arguments": "{"}}
    assert list(read(chat(tool_calls=[call]), chat(finish="tool_calls")).chunk_at_s) == [1.0]


def test_a_token_without_text_is_output() -> None:
    """Half a character is held back, but its id is there."""
    pieces = [{"index": 0, "text": "", "token_ids": [7]}, {"index": 0, "text": "é", "token_ids": [8]}]
    reading = read(*(event(choices=[piece]) for piece in pieces), text("", "length"))
    assert list(reading.chunk_at_s) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (usage(3, 0) + DONE, "no output"),
        (text("", "stop") + usage(3, 0) + DONE, "no output"),
        (b"", "the stream ended early"),
        (text("a") + text("b"), "the stream ended early"),
        (text("a") + event(error={"message": "boom", "code": 500}) + DONE, "an error inside the stream: boom"),
        (text("a") + event(error="boom"), "an error inside the stream: boom"),
        (event(object="error", message="boom", code=400), "an error inside the stream: boom"),
        (text("a") + b"data: {\n\n", "an event that is no chunk: "),
        (text("a") + text("b", "stop")[:-9], "an event that is no chunk: "),
    ],
)
def test_what_is_no_success_says_why(answer: bytes, failure: str) -> None:
    for reads in [(answer,), tuple(bytes([byte]) for byte in answer)]:
        assert (read(*reads).failure or "").startswith(failure)


def test_numbers_of_tokens_come_from_ids_then_usage_then_an_estimate() -> None:
    """Case 92: twelve tokens of one space each, which a tokenizer would make one of."""
    spaces = [text(" ") for _ in range(11)] + [text(" ", "length")]
    assert read(*spaces, usage(3, 12), DONE).said(estimate) == {"usage": 12}
    assert read(*spaces, DONE).said(lambda said: 1) == {"estimate": 1}
    ids = [tokens(7), tokens(7, finish="length")]
    assert read(*ids, DONE).said(estimate) == {"ids": 2}
    assert read(*ids, usage(3, 5), DONE).said(estimate) == {"ids": 2, "usage": 5}


def test_without_ids_chunks_are_tokens_only_if_there_are_as_many() -> None:
    chunks = [text("a"), text("b"), text("c", "length")]
    assert read(*chunks, usage(3, 3), DONE).place_tokens(3, "usage") == array("L", [1, 1, 1])
    assert read(*chunks, usage(3, 5), DONE).place_tokens(5, "usage") is None
    assert read(*chunks, DONE).place_tokens(3, "estimate") is None


def test_a_stop_token_without_text_is_the_last_event() -> None:
    reading = read(text("a"), text("b"), text("", "stop"), usage(3, 3), DONE)
    assert reading.place_tokens(3, "usage") == array("L", [1, 1, 1])
    assert list(reading.chunk_at_s) == [1.0, 2.0, 3.0]
    assert read(text("a"), text("", "length"), usage(3, 2), DONE).place_tokens(2, "usage") is None


def test_cached_tokens_are_read_from_usage() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 2}}
    assert read(text("a", "stop"), usage(3, 1, **details), DONE).num_cached == 2
    assert read(text("a", "stop"), usage(3, 1), DONE).num_cached is None
