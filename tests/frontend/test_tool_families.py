"""Every tool family with generated calls: whole, in all chunkings, cut behind every token (F2)."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.derendering import (
    PROMPT,
    check_every_cut,
    chunked,
    context,
    derender,
    derender_both_ways,
    shown,
    summary,
)
from fakes.families import FAMILIES, Call, Family, Mark, Written, encode, tools_for, vocabulary
from fourhop.frontend.context import Context
from fourhop.frontend.derender import Derenderer, Snapshot
from fourhop.frontend.detokenize import Detokenizer
from fourhop.frontend.output import CallCount
from fourhop.frontend.parsers.machine import Position
from fourhop.frontend.parsers.table import Scratch
from fourhop.frontend.stops import HeldTail
from fourhop.wire.derender import MAX_STATE_BYTES
from fourhop.wire.generate import ChunkChoice, FinishReason

NAMES = sorted(FAMILIES)
THINK_MARKS = ("<think>", "</think>")
RICH: list[Call] = [
    ("look_up", {"s": "é👋\"'\\{<b>&amp;", "n": -12, "x": [2.5, True, {"k": "}]"}], "z": None}),
    ("now", {}),
]


def given_calls(family: Family, calls: list[Call], *, is_spelled: bool, **request: Any) -> tuple[Context, list[int]]:
    """A context that offers these tools, and the ids of the output that calls them."""
    tokenizer = vocabulary(family, is_spelled=is_spelled, marks=THINK_MARKS)
    tools = tools_for(calls)
    return (
        context(None, family.parser, tokenizer=tokenizer, tools=tools, **request),
        encode(family.write(calls), tokenizer),
    )


def read_calls(answer: Any) -> list[Call]:
    return [(name, json.loads(arguments)) for name, arguments in shown(answer)[2]]


@pytest.mark.parametrize("is_spelled", [False, True], ids=["tokens", "spelled"])
@pytest.mark.parametrize("name", NAMES)
def test_calls_come_out_as_they_were_meant(name: str, is_spelled: bool) -> None:
    """Cases 40, 41, 44, 46 and 49: names, values, several calls, a call without arguments; cut anywhere."""
    ctx, ids = given_calls(FAMILIES[name], RICH, is_spelled=is_spelled, stop=["zz"])
    answer = check_every_cut(ctx, ids, step=5 if is_spelled else 1)
    assert read_calls(answer) == RICH
    assert (shown(answer)[0] or "").strip() == ""
    assert shown(answer)[2][1] == ("now", "{}")


@pytest.mark.parametrize("name", NAMES)
def test_arguments_grow_and_never_change(name: str) -> None:
    """What was said of a call stays: cut between characters, the arguments begin the whole ones."""
    ctx, ids = given_calls(FAMILIES[name], RICH, is_spelled=False)
    whole = shown(derender(ctx, chunked([ids], "length")))[2]
    for size in (n for n in range(len(ids)) if not 128 <= ids[n] < 192):
        cut = shown(derender(ctx, chunked([ids[:size]], "length")))[2]
        assert [f for f, _ in cut] == [f for f, _ in whole][: len(cut)]
        assert all(w.startswith(c) for (_, c), (_, w) in zip(cut, whole, strict=False))


@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
@pytest.mark.parametrize("name", NAMES)
def test_finish_reason(name: str, finish: FinishReason) -> None:
    """Case 50: truncation is never hidden, and tool_calls means that a call is whole."""
    call: list[Call] = [("look_up", {"city": "Oslo"})]
    ctx, ids = given_calls(FAMILIES[name], call, is_spelled=False)
    end = [257] if finish == "stop" else []
    called = "tool_calls" if finish == "stop" else finish
    for output, num_calls, expected in [
        (b"hi", 0, finish),
        (ids, 1, called),
        (ids[: _inside_arguments(ids)], None, finish),
    ]:
        answer = derender_both_ways(ctx, [*output, *end], finish)
        assert shown(answer)[3] == expected
        assert num_calls is None or len(shown(answer)[2]) == num_calls


def _inside_arguments(ids: list[int]) -> int:
    """Behind the first letters of Oslo."""
    return next(i for i in range(len(ids)) if ids[i : i + 4] == list(b"Oslo")) + 2


@pytest.mark.parametrize("name", NAMES)
def test_only_the_first_call_where_calls_are_not_parallel(name: str) -> None:
    ctx, ids = given_calls(FAMILIES[name], RICH, is_spelled=False, parallel_tool_calls=False)
    assert read_calls(derender_both_ways(ctx, ids, "length")) == RICH[:1]


@pytest.mark.parametrize("name", NAMES)
def test_a_long_argument_is_streamed_and_the_state_stays_small(name: str) -> None:
    call: list[Call] = [("look_up", {"q": "é👋\n" * 1500, "list": ["🙂" * 50] * 20})]
    ctx, ids = given_calls(FAMILIES[name], call, is_spelled=False)
    answer = derender(ctx, chunked([[token_id] for token_id in ids], "length"), carries_state=True)
    assert read_calls(answer) == call
    half = derender(ctx, chunked([ids[: len(ids) // 2]], "length"))
    assert len(shown(half)[2][0][1]) > 2000


# Generated calls

VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(
        ["</", "</parameter", "null", "{", "[1", "00742", "<tool_call>", "</think>", "\n\n", "\\u12", "'\""]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.from_regex("[a-zé_][a-z0-9_]{0,5}", fullmatch=True), VALUE, max_size=4)
PROSE = st.text(max_size=12) | st.sampled_from(["Sure.\n", "a < b", "{", "[x](y)", "<tool", "1. "])


@st.composite
def outputs(draw: st.DrawFn, family: Family, is_spelled: bool) -> tuple[str, str, list[Call]]:
    """Thinking, prose and calls that can be told apart: none of their texts spells a marker that is only text."""
    markers = (*family.spelled, *(family.marks if is_spelled else ()), *(THINK_MARKS if is_spelled else ()))
    texts = draw(st.lists(ARGUMENTS, min_size=1, max_size=3))
    calls = [(f"tool_{number}", arguments) for number, arguments in enumerate(texts)]
    thinking = draw(PROSE)
    prose = "" if family.is_bare else draw(PROSE)
    whole = [thinking, prose, *(json.dumps(arguments, ensure_ascii=False) for _, arguments in calls)]
    whole += [value for _, arguments in calls for value in arguments.values() if isinstance(value, str)]
    if any(marker in text for marker in markers for text in whole) or prose.startswith(" to="):
        thinking, prose, calls = "r", "", [("tool_0", {})]
    return thinking, prose, calls


@given(data=st.data(), name=st.sampled_from(NAMES), is_spelled=st.booleans())
@settings(max_examples=120)
def test_generated_calls_survive_every_chunking(data: st.DataObject, name: str, is_spelled: bool) -> None:
    """F2 over all families: thinking, prose and calls come out whole, however they are cut; and so does each prefix."""
    family = FAMILIES[name]
    thinking, prose, calls = data.draw(outputs(family, is_spelled))
    tokenizer = vocabulary(family, is_spelled=is_spelled, marks=THINK_MARKS)
    ctx = context("qwen3", family.parser, tokenizer=tokenizer, tools=tools_for(calls), prompt=PROMPT)
    written: Written = [Mark("<think>"), thinking, Mark("</think>"), prose, *family.write(calls)]
    ids = encode(written, tokenizer)
    whole = derender(ctx, chunked([ids], "length"))
    content, reasoning, _, _ = shown(whole)
    assert read_calls(whole) == calls
    assert (reasoning or "", content or "") == (thinking, prose) or name == "openai" or _is_layout(content, prose)
    size = data.draw(st.integers(0, len(ids)))
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=5)))
    expected = summary(derender(ctx, chunked([ids[:size]], "length")))
    parts = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    for pieces in (parts, [[token_id] for token_id in ids[:size]]):
        assert summary(derender(ctx, chunked(pieces, "length"), carries_state=True)) == expected


def _is_layout(content: str | None, prose: str) -> bool:
    return (content or "").strip() == prose.strip()


@given(data=st.data(), name=st.sampled_from(NAMES))
@settings(max_examples=100)
def test_any_order_of_markers_and_text(data: st.DataObject, name: str) -> None:
    """Broken markup breaks nothing: all chunkings still agree."""
    family = FAMILIES[name]
    calls: list[Call] = [("f", {"a": "x", "n": 3}), ("g", {})]
    tokenizer = vocabulary(family, is_spelled=False, marks=THINK_MARKS)
    pieces: list[str] = [
        *family.write(calls),
        *family.marks,
        Mark("</think>"),
        *'{}[]"\\:,=() >\n',
        '{"name":"f"',
        "f(a=",
    ]
    written = data.draw(st.lists(st.sampled_from(pieces), max_size=12))
    ctx = context("qwen3", family.parser, tokenizer=tokenizer, tools=tools_for(calls))
    ids = encode([Mark(piece) if piece in family.marks else piece for piece in written], tokenizer)
    whole = summary(derender(ctx, chunked([ids], "length")))
    singles = chunked([[token_id] for token_id in ids], "length")
    assert summary(derender(ctx, singles, carries_state=True)) == whole


FORGED = st.builds(
    Scratch,
    phase=st.integers(0, 12),
    depth=st.integers(0, 70),
    flags=st.integers(0, 255),
    text=st.text('{[(:v\x1f"ab ', max_size=4) | st.sampled_from(["assistant to=functions.f", "\x1ff\x1f"]),
    head=st.text('[{"7zxu\n ', max_size=4),
    span=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    stage=st.integers(0, 10),
    name=st.text("f.", max_size=3),
)


@given(data=st.data(), name=st.sampled_from(NAMES), scratch=FORGED)
@settings(max_examples=400)
def test_a_forged_memory_never_breaks_the_server(data: st.DataObject, name: str, scratch: Scratch) -> None:
    """What a client puts into a stream state is worked with, without an exception, and the state stays a state."""
    ctx, ids = given_calls(FAMILIES[name], RICH, is_spelled=False)
    state = data.draw(st.integers(0, len(ctx.table.states) - 1))
    snapshot = Snapshot(Detokenizer(), Position(state, "", scratch), HeldTail(), CallCount("seed"))
    derenderer = Derenderer(ctx, snapshot)
    cut = data.draw(st.integers(0, len(ids)))
    for part in (ids[cut:], ids):
        derenderer.feed(ChunkChoice(token_ids=part))
        derenderer = Derenderer.resume(ctx, derenderer.state())
    derenderer.feed(ChunkChoice(finish_reason="stop"))


@pytest.mark.parametrize("filler", ["👋", "{", " ", '"'])
@pytest.mark.parametrize("name", NAMES)
def test_no_flood_makes_the_state_grow(name: str, filler: str) -> None:
    """Wherever it stands in a call, a long run of anything is passed on or refused."""
    ctx, ids = given_calls(FAMILIES[name], [("f", {"a": "x"})], is_spelled=False)
    for cut in range(0, len(ids), 5):
        derenderer = Derenderer.start(ctx, 0)
        derenderer.feed(ChunkChoice(token_ids=ids[:cut]))
        for _ in range(6):
            derenderer.feed(ChunkChoice(token_ids=list(filler.encode()) * 180))
            assert len(msgspec.json.encode(derenderer.state())) <= MAX_STATE_BYTES
