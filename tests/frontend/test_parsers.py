"""Markup of the model families. Every output is read in all chunkings (F2) by `derender_any_way`."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.derendering import PROMPT, chunked, context, derender, derender_any_way, encode, shown, spelled_toy, toy
from fakes.toy import END_THINK, EOS, IM_START, THINK
from fourhop.frontend.context import Context
from fourhop.frontend.parsers import find
from fourhop.frontend.parsers.families import REASONING_FAMILIES, TOOL_FAMILIES
from fourhop.wire.errors import StartError
from fourhop.wire.generate import FinishReason

THINKING = [*PROMPT, THINK, 10]


def read(context: Context, text: str, finish: FinishReason = "stop") -> tuple[Any, ...]:
    end = [EOS] if finish == "stop" else []
    return shown(derender_any_way(context, encode(text) + end, finish))


def spelled(
    reasoning: str | None, tool: str | None, text: str, *, prompt: list[int] | None = PROMPT
) -> tuple[Any, ...]:
    """The same with a vocabulary that holds no marks: all of them are spelled."""
    ctx = context(reasoning, tool, tokenizer=spelled_toy(), prompt=prompt)
    return shown(derender_any_way(ctx, list(text.encode()), "length"))


def test_names_of_parsers_are_listed_when_one_is_unknown() -> None:
    with pytest.raises(StartError, match=r"'qwen4'; known: deepseek_r1, .*none, .*qwen3"):
        find("qwen4", None, toy())
    with pytest.raises(StartError, match=r"tool call parser 'x'; known: deepseek_v3, .*hermes"):
        find(None, "x", toy())


def test_families_have_vllms_names() -> None:
    assert set(REASONING_FAMILIES) >= {"qwen3", "deepseek_r1"}
    assert TOOL_FAMILIES["hermes"] is TOOL_FAMILIES["qwen3_json"] is not None


# Thinking


@pytest.mark.parametrize("family", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize("prompt", [THINKING, PROMPT])
def test_output_cut_while_thinking_is_no_answer(family: str, prompt: list[int]) -> None:
    """Case 32, also where the model opens its thinking itself."""
    opening = "" if prompt is THINKING else "<think>"
    result = read(context(family, prompt=prompt), opening + "because 1+1", "length")
    assert result == (None, "because 1+1", [], "length")


def test_thinking_and_answer() -> None:
    assert read(context("qwen3", prompt=THINKING), "r</think>a") == ("a", "r", [], "stop")


@pytest.mark.parametrize(("text", "expected"), [("Hello", ("Hello", None)), ("<think>r</think>Hello", ("Hello", "r"))])
def test_thinking_switched_off_gives_an_answer(text: str, expected: tuple[str, str | None]) -> None:
    """Case 34, also where the model thinks all the same."""
    closed = [*PROMPT, THINK, 10, 10, END_THINK, 10, 10]
    kwargs = {"enable_thinking": False}
    for prompt in (closed, PROMPT, None):
        assert read(context("qwen3", prompt=prompt, chat_template_kwargs=kwargs), text)[:2] == expected


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ([THINK, 10], True),
        ([THINK, 10, 10, END_THINK, 10], False),
        ([IM_START, THINK, 120, END_THINK, 97, IM_START, 98, IM_START, THINK], True),
        ([IM_START, 120, END_THINK, 97, IM_START, 98, IM_START, 99], False),
        ([IM_START, THINK, END_THINK, IM_START, 98, IM_START, THINK], True),
    ],
    ids="abcde",
)
def test_thinking_starts_as_the_prompts_last_turn_leaves_it(prompt: list[int], is_open: bool) -> None:
    """Case 35."""
    ctx = context("qwen3", prompt=prompt)
    assert read(ctx, "r</think>a")[:2] == (("a", "r") if is_open else ("ra", None))
    assert read(ctx, "a")[:2] == ((None, "a") if is_open else ("a", None))


def test_reasoning_ended_is_the_bit_for_the_engine() -> None:
    qwen3 = find("qwen3", None, toy())
    assert qwen3.reasoning_ended(THINKING, None) is False
    assert qwen3.reasoning_ended([*THINKING, END_THINK], None) is True
    assert qwen3.reasoning_ended(PROMPT, None) is False
    assert qwen3.reasoning_ended(PROMPT, {"enable_thinking": False}) is True
    assert find(None, "hermes", toy()).reasoning_ended(THINKING, None) is None


def test_deepseek_r1_thinks_from_the_start() -> None:
    """vLLM protocol 10.2: the opening tag is optional."""
    assert read(context("deepseek_r1"), "r</think>a") == ("a", "r", [], "stop")


def test_an_unknown_prompt_is_taken_to_have_opened_thinking() -> None:
    assert read(context("qwen3", prompt=None), "r</think>a")[:2] == ("a", "r")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Well,<think>r</think>a", ("Well,a", "r")),
        (" \n<think>r</think>a", (" \na", "r")),
        ("<note>", ("<note>", None)),
        ("1 <", ("1 <", None)),
        ("</thin", ("</thin", None)),
        ("<thinking>x", ("<thinking>x", None)),
        ("<<think>r", ("<", "r")),
        ("<think>a</thi</think>b", ("b", "a</thi")),
    ],
)
def test_spelled_markers(text: str, expected: tuple[str, str | None]) -> None:
    """Case 37: text before the opening marker is content; what is no marker comes out unchanged."""
    assert spelled("qwen3", None, text)[:2] == expected


def test_the_prompts_end_is_read_as_text_where_markers_are_spelled() -> None:
    assert spelled("qwen3", None, "r</think>a", prompt=list(b"x</think>y<think>\n"))[:2] == ("a", "r")
    assert spelled("qwen3", None, "a", prompt=list(b"<think>x</think>y"))[:2] == ("a", None)


def test_a_spelled_marker_is_text_where_the_vocabulary_has_it() -> None:
    """Case 38: only ids count."""
    text = "use <think> here and <tool_call>"
    ids = [*text.encode(), EOS]
    assert shown(derender_any_way(context("qwen3", "hermes"), ids)) == (text, None, [], "stop")
    ids = [*b"quote </think> r", END_THINK, *b"a", EOS]
    expected: tuple[Any, ...] = ("a", "quote </think> r", [], "stop")
    assert shown(derender_any_way(context("qwen3", "hermes", prompt=THINKING), ids)) == expected


CALL = '<tool_call>\n{"name":"f","arguments":{"n":7}}\n</tool_call>'


def test_calls_inside_thinking_are_text_by_default() -> None:
    """Case 38: an example in the thinking is not executed."""
    example = '<tool_call>{"name":"g","arguments":{}}</tool_call>'
    result = read(context("deepseek_r1", "hermes"), f"try {example}</think>{CALL}")
    assert result == (None, f"try {example}", [("f", '{"n":7}')], "tool_calls")


def test_a_call_ends_thinking_in_qwen3() -> None:
    """vLLM protocol 10.2: the family may leave its thinking open."""
    assert read(context("qwen3", "hermes", prompt=THINKING), f"r{CALL}") == (
        None,
        "r",
        [("f", '{"n":7}')],
        "tool_calls",
    )


def test_a_second_closing_marker_is_swallowed() -> None:
    assert read(context("qwen3", prompt=THINKING), "r</think>a</think>b")[:2] == ("ab", "r")


def test_thinking_ends_once() -> None:
    assert read(context("qwen3", prompt=THINKING), "r</think>use <think> here")[:2] == ("use <think> here", "r")


def test_markers_never_show() -> None:
    """Case 31: stop strings hold content back, not markers."""
    assert read(context("qwen3", stop=["zz"]), "<think>r</think>ok")[:2] == ("ok", "r")
    assert read(context("qwen3", stop=["7.5"]), "<think>is 7.5 r</think>ok")[:2] == ("ok", "is 7.5 r")


# Tool calls


@pytest.mark.parametrize("value", ["7", "true", "null", "[1,2]", '{"b":"x"}', '{"b":{"c":3}}', '"x"', "906.5", "-1e3"])
@pytest.mark.parametrize("layout", ['{{"name":"f","arguments":{}}}', '{{ "name" : "f" ,\n "arguments" : {} }} '])
def test_arguments_keep_their_end(value: str, layout: str) -> None:
    """Case 40: whatever the arguments end in, and wherever they are cut."""
    for arguments in (f'{{"n":{value}}}', value):
        text = f"<tool_call>\n{layout.format(arguments)}\n</tool_call>"
        assert read(context(None, "hermes"), text) == (None, None, [("f", arguments)], "tool_calls")
        assert spelled(None, "hermes", text) == (None, None, [("f", arguments)], "length")


@pytest.mark.parametrize("body", ['{"name":"now","arguments":{}}', '{"name":"now"}', '{"name":"now" }'])
def test_calls_without_arguments(body: str) -> None:
    """Case 41."""
    result = read(context(None, "hermes"), f"<tool_call>{body}</tool_call>")
    assert result == (None, None, [("now", "{}")], "tool_calls")


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_name_that_is_not_complete_is_no_call(finish: FinishReason) -> None:
    """Case 41: its text is content."""
    assert read(context(None, "hermes"), "<tool_call>no", finish) == ("no", None, [], finish)
    assert read(context(None, "hermes"), '<tool_call>\n{"name":"no', finish) == ('\n{"name":"no', None, [], finish)


@pytest.mark.parametrize("text", ['{"note":1}', "{", "[1", '{"name":"f","arguments":{}}'])
def test_json_that_is_no_call_is_content(text: str) -> None:
    """Case 49."""
    assert read(context(None, "hermes"), text) == (text, None, [], "stop")


@pytest.mark.parametrize(
    "body",
    ['{"note":1}', "not json", '{"name":7}', '{"name":""}', '{"name":"\\ud83d"}', "{'name':'f'}", "{}", "[]", "{]"],
)
def test_a_body_that_is_no_call_is_content(body: str) -> None:
    """Case 49: nothing is swallowed, and a call after it still counts."""
    ctx = context(None, "hermes")
    assert read(ctx, f"<tool_call>{body}</tool_call>") == (body, None, [], "stop")
    result = read(ctx, f"<tool_call>{body}</tool_call>{CALL}")
    assert result == (body, None, [("f", '{"n":7}')], "tool_calls")


@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
@pytest.mark.parametrize("closer", ["", "</tool_c"])
def test_a_cut_call_gives_its_arguments_once(finish: FinishReason, closer: str) -> None:
    """Cases 49 and 50."""
    text = '<tool_call>{"name":"f","arguments":{"city":"Os'
    assert read(context(None, "hermes"), text, finish) == (None, None, [("f", '{"city":"Os')], finish)
    whole = f'<tool_call>{{"name":"f","arguments":{{"city":"Oslo"}}}}{closer}'
    result = spelled(None, "hermes", whole)
    assert result == (None, None, [("f", '{"city":"Oslo"}')], "length")


def test_no_part_of_a_closing_marker_is_in_the_arguments() -> None:
    """Case 49, with a spelled marker: `derender_any_way` splits it at each character."""
    text = '<tool_call>{"name":"f","arguments":{"a":"<b>","c":"</tool"}}</tool_call>'
    assert spelled(None, "hermes", text) == (None, None, [("f", '{"a":"<b>","c":"</tool"}')], "length")


def test_the_last_closing_marker_may_be_missing() -> None:
    text = 'Sure.<tool_call>{"name":"f","arguments":{}}'
    assert read(context(None, "hermes"), text) == ("Sure.", None, [("f", "{}")], "tool_calls")


def test_several_calls_and_text_around_them() -> None:
    """vLLM protocol 10.2: content is what comes before the first call."""
    text = f'First.\n{CALL}\n<tool_call>{{"name":"g","arguments":{{}}}}</tool_call> done'
    calls = [("f", '{"n":7}'), ("g", "{}")]
    assert read(context(None, "hermes"), text) == ("First.\n", None, calls, "tool_calls")


def test_other_keys_and_the_order_of_keys() -> None:
    body = '{"id":[1,{"name":"x"}],"arguments":{"q":"a\\"}b"},"name":"f","arguments":{"second":1}}'
    result = read(context(None, "hermes"), f"<tool_call>{body}</tool_call>")
    assert result == (None, None, [("f", '{"q":"a\\"}b"}')], "tool_calls")


def test_arguments_pass_as_written() -> None:
    arguments = '{ "k": "\\u00e9 é \\\\",  "n": [ 1, {"x": "]}"} ] }'
    result = read(context(None, "hermes"), f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    assert result == (None, None, [("f", arguments)], "tool_calls")


def test_a_name_too_far_from_the_start_is_no_call() -> None:
    """The state of a stream stays small: text waits for the name up to a limit, in every chunking."""
    ctx = context(None, "hermes")
    for size in (900, 2000):
        body = f'{{"arguments":{{"q":"{"x" * size}"}},"name":"f"}}'
        text = f"<tool_call>{body}</tool_call>"
        ids = [*encode(text), EOS]
        whole = shown(derender(ctx, chunked([ids], "stop")))
        assert whole[0] == (None if size == 900 else body)
        singles = chunked([[token_id] for token_id in ids], "stop")
        assert shown(derender(ctx, singles, carries_state=True)) == whole


def test_without_tools_a_call_is_text() -> None:
    for choice in ({"tools": None}, {"tool_choice": "none"}):
        assert read(context(None, "hermes", **choice), CALL) == (CALL, None, [], "stop")


def test_only_the_first_call_where_calls_are_not_parallel() -> None:
    result = read(context(None, "hermes", parallel_tool_calls=False), CALL + CALL)
    assert result == (None, None, [("f", '{"n":7}')], "tool_calls")


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("tool_choice", ["auto", "required", NAMED])
@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
@pytest.mark.parametrize(
    ("text", "num_complete"), [("hi", 0), (CALL, 1), ('<tool_call>{"name":"f","arguments":{"n', 0)]
)
def test_finish_reason(tool_choice: Any, finish: FinishReason, text: str, num_complete: int) -> None:
    """Case 50: truncation is never hidden, and tool_calls means that there is one."""
    is_call = finish == "stop" and num_complete and tool_choice is not NAMED
    result = read(context(None, "hermes", tool_choice=tool_choice), text, finish)
    assert result[3] == ("tool_calls" if is_call else finish)
