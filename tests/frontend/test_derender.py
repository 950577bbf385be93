from __future__ import annotations

import json
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as NativeTokenizer

from fakes.derendering import (
    PROMPT,
    chunked,
    context,
    derender,
    derender_any_way,
    encode,
    piece_toy,
    shown,
    spelled_toy,
    summary,
    toy,
)
from fakes.toy import END_THINK, EOS, THINK, byte_symbols
from fourhop.frontend.answers import Answer
from fourhop.frontend.context import Context, completion_context
from fourhop.frontend.derender import Delta, Derenderer
from fourhop.frontend.tokenizer import Tokenizer
from fourhop.wire.derender import MAX_STATE_BYTES, StreamState
from fourhop.wire.errors import ClientError
from fourhop.wire.generate import ChunkChoice, FinishReason
from fourhop.wire.logprobs import ChoiceLogprobs, TokenLogprob, TopLogprob
from fourhop.wire.openai_completion import CompletionRequest

CALL = '<tool_call>\n{"name":"f","arguments":{"n":7}}\n</tool_call>'


def logprobs(ids: list[int]) -> ChoiceLogprobs:
    """The token at place i has log-probability -i and one alternative, "!"."""
    return ChoiceLogprobs([TokenLogprob(t, -float(i), 1, [TopLogprob(33, -9.0, 2)]) for i, t in enumerate(ids)])


# Stops


@pytest.mark.parametrize(
    ("stop", "text", "content"),
    [
        (["\n"], "k", "k"),
        (["<END>"], "a<", "a<"),
        (["XYZ"], "Well, XY", "Well, XY"),
        (["tre"], "un, due, ", "un, due, "),
    ],
)
def test_the_held_tail_is_not_lost(stop: list[str], text: str, content: str) -> None:
    """Case 28 (i, ii)."""
    assert shown(derender_any_way(context(stop=stop), [*encode(text), EOS]))[0] == content


def test_the_held_tail_is_flushed_through_the_parsers() -> None:
    """Case 28 (iii)."""
    ids = [*encode("XY" + CALL), EOS]
    result = shown(derender_any_way(context(None, "hermes", stop=["XYZ"]), ids))
    assert result == ("XY", None, [("f", '{"n":7}')], "tool_calls")
    ctx = context(None, "hermes", stop=["XYZ"], tokenizer=spelled_toy())
    cut = list((CALL[:-2]).encode())
    assert shown(derender_any_way(ctx, cut, "length")) == (None, None, [("f", '{"n":7}')], "length")


def test_a_stop_string_does_not_reach_over_a_marker() -> None:
    result = shown(derender_any_way(context("qwen3", stop=["ab"]), [97, THINK, 98, END_THINK, 98, EOS]))
    assert result == ("ab", "b", [], "stop")


@pytest.mark.parametrize("finish", ["stop", "length", None])
def test_tokens_after_a_stop_string_do_not_exist(finish: FinishReason | None) -> None:
    """Case 29: one step with the pieces ab, c, d, ef."""
    ctx = context(tokenizer=_words(), stop=["cd"], logprobs=True)
    ids = [256, 99, 100, 257]
    choice = ChunkChoice(token_ids=ids, finish_reason=finish, logprobs=logprobs(ids))
    derenderer = Derenderer.start(ctx, 0)
    delta = derenderer.feed(choice)
    assert (delta.content, delta.finish_reason, delta.stop_reason, delta.stopped) == ("ab", "stop", "cd", True)
    assert delta.token_ids == [256, 99, 100]
    assert delta.num_tokens == 3
    assert delta.logprobs is not None and delta.logprobs.content is not None
    assert [entry.token for entry in delta.logprobs.content] == ["ab", "c", "d"]
    late = derenderer.feed(ChunkChoice(token_ids=[97, 98], finish_reason="length"))
    assert late == Delta()


def test_a_stop_string_is_kept_if_asked_for() -> None:
    answer = derender_any_way(context(stop="cd", include_stop_str_in_output=True), [*b"abcd", EOS])
    assert shown(answer)[0] == "abcd"


def test_nothing_counts_after_an_end_token() -> None:
    """Case 29: a step `x </s> y z`."""
    answer = derender(context(), [ChunkChoice(token_ids=[120, EOS, 121, 122], finish_reason="length")])
    assert shown(answer) == ("x", None, [], "stop")
    assert answer.num_tokens == 2


def test_a_stop_token_in_a_step_is_not_text() -> None:
    """Case 31: stop token 33 with a step 104 105 33 97."""
    answer = derender(context(stop_token_ids=[33]), [ChunkChoice(token_ids=[104, 105, 33, 97], finish_reason="stop")])
    assert shown(answer)[0::3] == ("hi", "stop")
    assert answer.token_ids == [104, 105, 33]


def test_an_engine_that_goes_on_after_a_stop_token_is_to_be_stopped() -> None:
    derenderer = Derenderer.start(context(stop_token_ids=[33]), 0)
    first = derenderer.feed(ChunkChoice(token_ids=[104, 33]))
    assert (first.content, first.finish_reason, first.stopped) == ("h", None, False)
    second = derenderer.feed(ChunkChoice(token_ids=[97]))
    assert (second.content, second.finish_reason, second.stop_reason, second.stopped) == (None, "stop", 33, True)


def test_the_last_token_of_a_stopped_choice_is_not_text() -> None:
    """An end token that only the engine knows of; where it found a stop string instead, the token is text."""
    assert shown(derender(context(), chunked([[97, 33]], "stop")))[0] == "a"
    assert shown(derender(context(), chunked([[97, 33]], "length")))[0] == "a!"
    found = ChunkChoice(token_ids=[97, 33], finish_reason="stop", stop_reason="!")
    assert shown(derender(context(), [found]))[0] == "a!"
    assert shown(derender(context(include_stop_str_in_output=True), chunked([[97, 33]], "stop")))[0] == "a!"


def test_ignore_eos_goes_on() -> None:
    answer = derender(context(ignore_eos=True), chunked([[97, EOS, 98]], "length"))
    assert shown(answer)[0] == "ab"


def test_an_end_token_at_once_is_an_empty_answer() -> None:
    assert shown(derender_any_way(context(), [EOS])) == ("", None, [], "stop")


def test_a_character_cut_by_the_limit_is_one_replacement() -> None:
    assert shown(derender_any_way(context(), [97, 240, 159], "length"))[0] == "a�"
    assert shown(derender_any_way(context("qwen3"), [240, 159, THINK, 97], "length"))[:2] == ("�", "a")


# State


def _state(derenderer: Derenderer) -> StreamState:
    data = msgspec.json.encode(derenderer.state())
    assert len(data) <= MAX_STATE_BYTES
    return msgspec.json.decode(data, type=StreamState)


def test_a_character_over_chunk_edges_with_nothing_but_the_state() -> None:
    """Case 23."""
    ctx = context()
    answer = derender(ctx, chunked([[120, 240], [159], [145, 139, 121]], "length"), carries_state=True)
    assert shown(answer)[0] == "x👋y"


def test_the_same_chunk_again_gives_the_same_answer() -> None:
    """Case 23: call ids included, which stay the same for the whole call."""
    ctx = context(None, "hermes")
    ids = encode(CALL)
    state, seen = _state(Derenderer.start(ctx, 0)), Answer()
    for part in (ids[:9], ids[9:22], ids[22:30], ids[30:]):
        derenderer = Derenderer.resume(ctx, state)
        delta = derenderer.feed(ChunkChoice(token_ids=part))
        assert Derenderer.resume(ctx, state).feed(ChunkChoice(token_ids=part)) == delta
        state = _state(derenderer)
        seen.add(delta)
    assert len(seen.calls) == 1
    assert seen.calls[0].id.startswith("chatcmpl-tool-")


def test_call_ids_differ_between_calls_choices_and_turns() -> None:
    def ids(prompt: list[int], index: int) -> list[str]:
        derenderer = Derenderer.start(context(None, "hermes", prompt=prompt), index)
        delta = derenderer.feed(ChunkChoice(index, encode(CALL + CALL), "length"))
        return [str(call.id) for call in delta.tool_calls]

    assert len({*ids(PROMPT, 0), *ids(PROMPT, 1), *ids([*PROMPT, 97], 0)}) == 6


def _tampered(state: StreamState) -> list[StreamState]:
    flipped = [bytes([*state.data[:i], state.data[i] ^ 4, *state.data[i + 1 :]]) for i in range(len(state.data))]
    short = [state.data[:-1], b"", b"\xc1"]
    resealed = [StreamState(1, zlib.crc32(data), data) for data in short]
    return [
        *(msgspec.structs.replace(state, data=data) for data in [*flipped, *short]),
        *resealed,
        msgspec.structs.replace(state, version=2),
    ]


def test_a_tampered_state_is_refused() -> None:
    """Case 23."""
    ctx = context("qwen3", "hermes", stop=["zz"])
    derenderer = Derenderer.start(ctx, 0)
    derenderer.feed(ChunkChoice(token_ids=encode("<think>r</think>az")))
    for state in _tampered(derenderer.state()):
        with pytest.raises(ClientError) as caught:
            Derenderer.resume(ctx, state)
        assert caught.value.param == "stream_state"


def test_a_state_of_another_request_is_refused() -> None:
    derenderer = Derenderer.start(context(stop=["zz"]), 0)
    derenderer.feed(ChunkChoice(token_ids=[122]))
    inside = Derenderer.start(context("qwen3", "hermes", prompt=[THINK]), 0)
    for state in (derenderer.state(), inside.state()):
        with pytest.raises(ClientError):
            Derenderer.resume(context(), state)


JUNK = st.integers(-3, 2**40) | st.text(max_size=3) | st.binary(max_size=4) | st.none() | st.lists(st.integers(0, 9))


def _forge(data: st.DataObject, value: Any) -> Any:
    """The same nesting with some of its values replaced."""
    if isinstance(value, list | tuple) and data.draw(st.integers(0, 9)):
        return [_forge(data, inner) for inner in value]
    if isinstance(value, bytes | str) or data.draw(st.booleans()):
        return value
    return data.draw(JUNK | st.integers(0, 12))


@given(
    data=st.data(), output=st.sampled_from(["<think>r", "az", '<tool_call>{"arguments":[1', '<tool_call>{"name":"f"'])
)
@settings(max_examples=100, deadline=None)
def test_a_forged_state_never_breaks_the_server(data: st.DataObject, output: str) -> None:
    """What passes the checks is worked with, without an exception."""
    ctx = context("qwen3", "hermes", stop=["zz"])
    derenderer = Derenderer.start(ctx, 0)
    derenderer.feed(ChunkChoice(token_ids=encode(output)))
    raw = msgspec.msgpack.encode(_forge(data, msgspec.msgpack.decode(derenderer.state().data)))
    try:
        derenderer = Derenderer.resume(ctx, StreamState(1, zlib.crc32(raw), raw))
    except ClientError:
        return
    rest = encode('{"name":"f","arguments":{"a":[1]}} z</tool_call>x')
    derenderer.feed(ChunkChoice(token_ids=rest, finish_reason="stop"))
    derenderer.state()


def test_the_state_does_not_grow_with_the_output() -> None:
    ctx = context("qwen3", "hermes", prompt=[*PROMPT, THINK], stop=["z" * 500])
    derenderer = Derenderer.start(ctx, 0)
    sizes = []
    long_call = '<tool_call>{"name":"f","arguments":{"q":"' + "\n🙂" * 1500
    for token_id in encode("r" * 3000 + "</think>" + "z" * 499 + "a" * 2000 + "z" * 499 + long_call):
        derenderer.feed(ChunkChoice(token_ids=[token_id]))
        sizes.append(len(msgspec.json.encode(derenderer.state())))
    assert max(sizes) <= 200
    held = Derenderer.start(ctx, 0)
    for token_id in encode("</think><tool_call>" + '{"arguments":"' + "🙂" * 600):
        held.feed(ChunkChoice(token_ids=[token_id]))
        assert len(msgspec.json.encode(held.state())) <= MAX_STATE_BYTES


# Choices, thinking, logprobs


def test_choices_do_not_share_state() -> None:
    """Case 56: interleaved token by token, B delayed, A finished first."""
    ctx = context("qwen3", "hermes", prompt=[*PROMPT, THINK])
    a, b = encode("r1</think>a1</s>"), encode(f"r2</think>{CALL}</s>")
    derenderers, answers = [Derenderer.start(ctx, 0), Derenderer.start(ctx, 1)], [Answer(), Answer()]
    steps: list[tuple[int, int | None]] = [(0, a[0]), (0, a[1])]
    for number in range(max(len(a), len(b))):
        steps += [(0, a[number + 2])] if number + 2 < len(a) else []
        steps += [(1, b[number])] if number < len(b) else []
    for index, token_id in [*steps, (0, None), (1, None)]:
        finish: FinishReason | None = "stop" if token_id is None else None
        chunk = ChunkChoice(index, [] if token_id is None else [token_id], finish)
        answers[index].add(derenderers[index].feed(chunk))
    assert shown(answers[0]) == ("a1", "r1", [], "stop")
    assert shown(answers[1]) == (None, "r2", [("f", '{"n":7}')], "tool_calls")


def test_thinking_tokens_are_counted_without_their_markers() -> None:
    answer = derender_any_way(context("qwen3"), [*encode("<think>abc</think>de"), EOS])
    assert (answer.num_reasoning_tokens, answer.num_tokens) == (3, 8)
    whole = derender_any_way(context("qwen3", prompt=[THINK]), encode("abc"), "length")
    assert (whole.num_reasoning_tokens, whole.num_tokens) == (3, 3)


def test_hidden_thinking_hides_its_tokens_too() -> None:
    ctx = context("qwen3", include_reasoning=False, logprobs=True, top_logprobs=1)
    ids = [*encode("<think>abc</think>de"), EOS]
    answer = derender(ctx, [ChunkChoice(token_ids=ids, finish_reason="stop", logprobs=logprobs(ids))])
    assert shown(answer) == ("de", None, [], "stop")
    assert answer.token_ids == [THINK, *b"de", EOS]
    assert [entry.logprob for entry in answer.logprobs or []] == [0.0, -5.0, -6.0, -7.0]
    assert answer.num_reasoning_tokens == 3


def _with_logprobs(ids: list[int], size: int) -> list[ChunkChoice]:
    entries = logprobs(ids).content
    return [
        ChunkChoice(token_ids=ids[i : i + size], logprobs=ChoiceLogprobs(entries[i : i + size]))
        for i in range(0, len(ids), size)
    ]


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_logprobs_stay_aligned_through_the_parsers(size: int) -> None:
    ids = encode("<think>é</think>👋" + CALL)
    answer = derender(context("qwen3", "hermes", logprobs=True, top_logprobs=1), _with_logprobs(ids, size))
    entries = answer.logprobs or []
    assert [entry.logprob for entry in entries] == [-float(i) for i in range(len(ids))]
    joined = [byte for entry in entries for byte in entry.bytes or []]
    assert bytes(joined).decode() == "<think>é</think>👋" + CALL
    assert entries[0].token == "<think>"
    assert entries[1].token == "�" and entries[1].bytes == [195]
    assert entries[0].top_logprobs[0].token == "!" and entries[0].top_logprobs[0].logprob == -9.0


def test_no_logprobs_unless_asked_for() -> None:
    assert derender(context(), _with_logprobs(encode("ab"), 1)).logprobs is None
    bare = derender(context(logprobs=True), _with_logprobs(encode("ab"), 1)).logprobs
    assert bare is not None and bare[0].top_logprobs == []


def _completion(**request: Any) -> Context:
    wanted = CompletionRequest(prompt="", **request)
    return completion_context(wanted, [*b"p"], toy(), eos_token_ids=frozenset({EOS}))


@pytest.mark.parametrize("size", [1, 2, 100])
def test_completion_logprobs_give_each_tokens_place_in_the_text(size: int) -> None:
    answer = derender(_completion(logprobs=1), _with_logprobs([97, 195, 169, 98, EOS], size))
    choice = answer.completion_choice(0)
    assert choice.text == "aéb"
    assert choice.logprobs is not None
    assert choice.logprobs.text_offset == [0, 1, 1, 2, 3]
    assert choice.logprobs.tokens == ["a", "�", "�", "b", "</s>"]
    assert choice.logprobs.token_logprobs == [0.0, -1.0, -2.0, -3.0, -4.0]
    assert choice.logprobs.top_logprobs[0] == {"!": -9.0, "a": 0.0}


def test_completions_have_no_parsers() -> None:
    text = f"<think>r</think>{CALL}"
    answer = derender(_completion(), chunked([[*encode(text), EOS]], "stop"))
    assert answer.completion_choice(0).text == text
    assert answer.completion_choice(0).finish_reason == "stop"


def test_special_tokens_are_shown_if_asked_for() -> None:
    answer = derender(_completion(skip_special_tokens=False), chunked([[256, 97]], "length"))
    assert answer.completion_choice(0).text == "<s>a"


# Chunk invariance over generated outputs

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
TEXT = st.text(max_size=8) | st.sampled_from(["<", "</", "<thi", "</tool_", "{", "stop", "sto", "\n"])
MARK = st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "<s>"])


@st.composite
def calls(draw: st.DrawFn) -> str:
    body = {"name": draw(st.text("fg_é", min_size=1, max_size=4)), "arguments": draw(JSON)}
    keys = draw(st.permutations(sorted(body)))
    text = json.dumps(
        {key: body[key] for key in keys}, ensure_ascii=draw(st.booleans()), indent=draw(st.none() | st.just(1))
    )
    return f"<tool_call>\n{text}\n</tool_call>"


OUTPUTS = st.lists(TEXT | MARK | calls() | st.builds("<think>{}</think>".format, TEXT), max_size=5).map("".join)
FAMILIES = st.sampled_from([(r, t) for r in (None, "qwen3", "deepseek_r1") for t in (None, "hermes")])


@given(
    output=OUTPUTS,
    junk=st.binary(max_size=3),
    families=FAMILIES,
    is_spelled=st.booleans(),
    is_open=st.booleans(),
    stop=st.sampled_from([None, ["stop"], ["\n", "<"], ["aab", "ab"]]),
    finish=st.sampled_from(["stop", "length", "abort"]),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_chunks_do_not_matter(
    output: str,
    junk: bytes,
    families: tuple[str | None, str | None],
    is_spelled: bool,
    is_open: bool,
    stop: list[str] | None,
    finish: FinishReason,
    data: st.DataObject,
) -> None:
    """F2: thinking, content, calls, counts and finish reason, cut at any token, with the state carried at each cut."""
    prompt = [*PROMPT, *(b"<think>" if is_spelled else [THINK])] if is_open else PROMPT
    tokenizer = spelled_toy() if is_spelled else toy()
    ctx = context(*families, tokenizer=tokenizer, prompt=prompt, stop=stop)
    ids = [*tokenizer.encode(output, add_special_tokens=False), *junk]
    ids = ids[: data.draw(st.integers(0, len(ids)))] + ([EOS] if finish == "stop" and not is_spelled else [])
    if is_spelled and finish == "stop":
        finish = "length"
    whole = summary(derender(ctx, chunked([ids], finish)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    parts = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    for pieces in (parts, [[token_id] for token_id in ids]):
        for trailing in (False, True):
            chunks = chunked(pieces, finish, trailing_finish=trailing)
            assert summary(derender(ctx, chunks, carries_state=True)) == whole


@given(output=OUTPUTS, families=FAMILIES)
@settings(max_examples=60, deadline=None)
def test_no_text_is_lost_and_none_invented(output: str, families: tuple[str | None, str | None]) -> None:
    """Without calls: content and thinking are the output without its markers."""
    ids = [token_id for token_id in encode(output) if token_id not in (260, 261)]
    answer = derender(context(*families), chunked([ids], "length"))
    content, reasoning, _, _ = shown(answer)
    plain = toy().decode([token_id for token_id in ids if token_id not in (THINK, END_THINK)])
    markers = ("<think>", "</think>") if families[0] is None else ("<think>",)
    text = (content or "") + (reasoning or "")
    for marker in markers:
        text = text.replace(marker, "")
        plain = plain.replace(marker, "")
    assert sorted(text) == sorted(plain)


@given(ids=st.lists(st.integers(0, 263), max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_tokens_at_all(ids: list[int]) -> None:
    ctx = context("qwen3", "hermes", stop=["ab"])
    whole = summary(derender(ctx, chunked([ids], "length")))
    singles = chunked([[token_id] for token_id in ids], "length")
    assert summary(derender(ctx, singles, carries_state=True)) == whole


def test_truncation_at_every_token() -> None:
    """Every prefix of an output with thinking, text and two calls reads the same in all chunkings."""
    ids = encode(f'<think>r é</think>ok {CALL}<tool_call>{{"name":"g"}}</tool_call>')
    ctx = context("qwen3", "hermes", stop=["zz"])
    for size in range(len(ids)):
        whole = summary(derender(ctx, chunked([ids[:size]], "length")))
        singles = chunked([[token_id] for token_id in ids[:size]], "length")
        assert summary(derender(ctx, singles, carries_state=True)) == whole
        assert whole["finish_reason"] == "length"


def test_spaces_of_piece_vocabularies_survive_the_state() -> None:
    """Case 26, through the whole way."""
    ctx = context(tokenizer=piece_toy(), prompt=[], ignore_eos=True)
    ids = [256, 257, 258, 259, 260]
    singles = chunked([[token_id] for token_id in ids], "length")
    assert shown(derender(ctx, singles, carries_state=True))[0] == piece_toy().decode(ids) == "a. It  x"


def _words() -> Tokenizer:
    """The bytes, and the words "ab" (256) and "ef" (257) as tokens."""
    native = NativeTokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(byte_symbols())}, merges=[]))
    native.decoder = decoders.ByteLevel()
    native.add_tokens([AddedToken("ab"), AddedToken("ef")])
    return Tokenizer(native, vocab_size=258, special_tokens={})
