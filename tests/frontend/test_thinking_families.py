"""Every reasoning family: where thinking starts, how it ends, what is an answer (cases 32 to 38)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.derendering import check_every_cut, chunked, context, derender, marked_toy, shown, summary
from fakes.families import Mark, Written, encode
from fourhop.frontend.parsers import find
from fourhop.frontend.parsers.families import REASONING_FAMILIES, TOOL_FAMILIES


@dataclass(frozen=True)
class Thinker:
    """`turn` begins a turn in a prompt. `off` are template arguments that switch thinking off."""

    parser: str
    opening: str = "<think>"
    closing: str = "</think>"
    turn: str = "<|im_start|>"
    off: tuple[dict[str, Any], ...] = ()
    opens_unasked: bool = False
    is_off_unasked: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.opening, self.closing, self.turn)


OFF = {"enable_thinking": False}
THINKERS = [
    Thinker("qwen3", off=(OFF,)),
    Thinker("nemotron_v3", off=(OFF,), opens_unasked=True),
    Thinker("deepseek_r1", turn="<｜Assistant｜>", opens_unasked=True),
    Thinker("deepseek_v3", turn="<｜Assistant｜>", off=({}, {"thinking": False}), is_off_unasked=True),
    Thinker("glm45", turn="<|assistant|>", off=(OFF, {"thinking": False})),
    Thinker("glm47", turn="<|assistant|>", off=(OFF,)),
    Thinker("kimi_k2", turn="<|im_assistant|>", off=(OFF, {"thinking": False}), opens_unasked=True),
    Thinker("minimax_m2", turn="]~b]", opens_unasked=True),
    Thinker("step3", turn="<|BOT|>", opens_unasked=True),
    Thinker("seed_oss", "<seed:think>", "</seed:think>", "<seed:bos>"),
    Thinker("mistral", "[THINK]", "[/THINK]", "[/INST]"),
    Thinker(
        "granite",
        "Here is my thought process:",
        "Here is my response:",
        "<|start_of_role|>",
        ({},),
        is_off_unasked=True,
    ),
]
EACH = pytest.mark.parametrize("thinker", THINKERS, ids=lambda thinker: thinker.parser)
SPELLED = pytest.mark.parametrize("is_spelled", [False, True], ids=["tokens", "spelled"])


def read(
    thinker: Thinker, prompt: Written | None, output: Written, *, is_spelled: bool, **request: Any
) -> tuple[Any, ...]:
    # Granite's sentences are in no vocabulary.
    tokenizer = marked_toy(() if is_spelled or thinker.parser == "granite" else thinker.marks)
    ids = None if prompt is None else encode(prompt, tokenizer)
    ctx = context(thinker.parser, tokenizer=tokenizer, prompt=ids, **request)
    return shown(check_every_cut(ctx, encode(output, tokenizer), step=4))


def opened(thinker: Thinker) -> Written:
    return [Mark(thinker.turn), "assistant\n", Mark(thinker.opening), "\n"]


@SPELLED
@EACH
def test_thinking_and_answer(thinker: Thinker, is_spelled: bool) -> None:
    """Whether the prompt opened thinking or the model does."""
    end = [Mark(thinker.closing), "a é"]
    assert read(thinker, opened(thinker), ["r 中", *end], is_spelled=is_spelled)[:2] == ("a é", "r 中")
    own = [Mark(thinker.opening), "r", *end]
    assert read(thinker, [Mark(thinker.turn)], own, is_spelled=is_spelled)[:2] == ("a é", "r")


@EACH
def test_output_cut_while_thinking_is_no_answer(thinker: Thinker) -> None:
    """Case 32."""
    unopened: Written = [Mark(thinker.turn)]
    thinks: Written = [Mark(thinker.opening), "because 1+1"]
    for prompt, output in [(opened(thinker), ["because 1+1"]), (unopened, thinks)]:
        assert read(thinker, prompt, output, is_spelled=False) == (None, "because 1+1", [], "length")


@SPELLED
@EACH
def test_thinking_switched_off_gives_an_answer(thinker: Thinker, is_spelled: bool) -> None:
    """Case 34: closed by the prompt, or by the request where the prompt is not known or says nothing."""
    closed = [*opened(thinker), "\n", Mark(thinker.closing), "\n"]
    assert read(thinker, closed, ["Hello"], is_spelled=is_spelled)[:2] == ("Hello", None)
    split = [Mark(thinker.opening), "r", Mark(thinker.closing), "Hello"]
    prompts: tuple[Written | None, ...] = (None, [Mark(thinker.turn)])
    for kwargs in thinker.off:
        for prompt in prompts:
            for output, expected in ((["Hello"], ("Hello", None)), (split, ("Hello", "r"))):
                result = read(thinker, prompt, output, is_spelled=is_spelled, chat_template_kwargs=kwargs)
                assert result[:2] == expected


@SPELLED
@EACH
def test_thinking_starts_as_the_prompts_last_turn_leaves_it(thinker: Thinker, is_spelled: bool) -> None:
    """Case 35: earlier turns do not matter, nor do a system text's own marks."""
    opening, closing, turn = map(Mark, thinker.marks)
    for prompt in (
        [turn, opening, "x", closing, "y", turn, opening],
        [turn, opening, closing, turn, "u", turn, opening],
    ):
        assert read(thinker, prompt, ["r", closing, "a"], is_spelled=is_spelled)[:2] == ("a", "r")
    earlier = [turn, opening, "x", closing, "y", turn, "u", turn]
    expected = (None, "a") if thinker.opens_unasked else ("a", None)
    assert read(thinker, earlier, ["a"], is_spelled=is_spelled)[:2] == expected


@EACH
def test_an_unknown_prompt_is_taken_to_have_opened_thinking_unless_it_is_off(thinker: Thinker) -> None:
    output = ["r", Mark(thinker.closing), "a"]
    content, reasoning = read(thinker, None, output, is_spelled=False)[:2]
    if not thinker.is_off_unasked:
        assert (content, reasoning) == ("a", "r")
        return
    assert reasoning is None
    on = {"thinking": True}
    assert read(thinker, None, output, is_spelled=False, chat_template_kwargs=on)[:2] == ("a", "r")


@EACH
def test_a_spelled_marker_is_text_where_the_vocabulary_has_it(thinker: Thinker) -> None:
    """Case 38: only ids count; sentences are no tokens, so they count wherever they are expected."""
    if thinker.parser == "granite":
        return
    text = f"use {thinker.opening} here"
    closed = [*opened(thinker), Mark(thinker.closing)]
    assert read(thinker, closed, [text], is_spelled=False)[:2] == (text, None)
    quote = f"quote {thinker.closing} r"
    assert read(thinker, opened(thinker), [quote, Mark(thinker.closing), "a"], is_spelled=False)[:2] == ("a", quote)


def test_granites_sentences_are_words_of_an_answer() -> None:
    granite = THINKERS[-1]
    text = "Here is my response: no. Here is my thought"
    assert read(granite, [Mark(granite.turn)], [text], is_spelled=True)[:2] == (text, None)
    written: Written = ["Here's my thought process: r Here's my response: a. Here is my response: b"]
    assert read(granite, [Mark(granite.turn)], written, is_spelled=True)[:2] == (" a. Here is my response: b", " r ")


CALL_ENDS = {"qwen3": "hermes", "glm45": "glm45", "kimi_k2": "kimi_k2", "deepseek_v3": "deepseek_v31"}


@EACH
def test_calls_inside_thinking(thinker: Thinker) -> None:
    """Case 38: an example in the thinking is text, except in families that leave thinking open before a call."""
    tool = CALL_ENDS.get(thinker.parser, "qwen3_coder" if thinker.parser == "nemotron_v3" else "hermes")
    calls = {
        "glm45": ["<tool_call>", "f", "</tool_call>"],
        "hermes": ["<tool_call>", '{"name":"f"}', "</tool_call>"],
        "qwen3_coder": ["<tool_call>", "<function=f></function>", "</tool_call>"],
        "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "f", "<|tool_call_argument_begin|>", "{}"],
        "deepseek_v31": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "f", "<｜tool▁sep｜>", "{}"],
    }
    written: Written = [Mark(piece) if piece.startswith("<") and "=" not in piece else piece for piece in calls[tool]]
    marks = tuple({piece for piece in written if isinstance(piece, Mark)})
    tokenizer = marked_toy((*(() if thinker.parser == "granite" else thinker.marks), *marks))
    ctx = context(thinker.parser, tool, tokenizer=tokenizer, prompt=encode(opened(thinker), tokenizer))
    ends = thinker.parser in ("qwen3", "glm45", "glm47", "kimi_k2", "deepseek_v3")
    _, reasoning, found, _ = shown(check_every_cut(ctx, encode(["r", *written], tokenizer)))
    assert [name for name, _ in found] == (["f"] if ends else [])
    assert (reasoning == "r") == ends
    _, _, found, _ = shown(
        derender(ctx, chunked([encode(["r", Mark(thinker.closing), *written], tokenizer)], "length"))
    )
    assert found == [("f", "{}")]


@EACH
def test_reasoning_ended_is_the_bit_for_the_engine(thinker: Thinker) -> None:
    tokenizer = marked_toy(() if thinker.parser == "granite" else thinker.marks)
    parsers = find(thinker.parser, None, tokenizer)
    prompt = encode(opened(thinker), tokenizer)
    assert parsers.reasoning_ended(prompt, None) is False
    assert parsers.reasoning_ended(prompt + encode([Mark(thinker.closing)], tokenizer), None) is True
    bare = encode([Mark(thinker.turn)], tokenizer)
    assert parsers.reasoning_ended(bare, None) is thinker.is_off_unasked
    assert all(parsers.reasoning_ended(bare, kwargs) for kwargs in thinker.off)


def test_names_are_vllms() -> None:
    assert set(REASONING_FAMILIES) == {thinker.parser for thinker in THINKERS} | {"none", "openai_gptoss"}
    assert TOOL_FAMILIES["qwen3_xml"] is TOOL_FAMILIES["qwen3_coder"]
    assert TOOL_FAMILIES["llama4_json"] is TOOL_FAMILIES["llama3_json"]
    assert TOOL_FAMILIES["glm47"] is TOOL_FAMILIES["glm45"]


@given(
    data=st.data(), reasoning=st.sampled_from(sorted(REASONING_FAMILIES)), tool=st.sampled_from(sorted(TOOL_FAMILIES))
)
@settings(max_examples=150)
def test_any_two_families_read_anything_in_all_chunkings(data: st.DataObject, reasoning: str, tool: str) -> None:
    """F2 for families that do not belong together as well, over markers in any order."""
    states = [*find(reasoning, tool, marked_toy(())).with_tools.states]
    markers = sorted({marker for state in states for marker in state.by_text.phrases})
    tokenizer = marked_toy(tuple(marker for marker in markers if data.draw(st.booleans())))
    pieces = [
        *map(Mark, markers),
        "f",
        '{"name":"f","arguments":{"a":[1]}}',
        " ",
        "é",
        "[f(a='x')]",
        "analysis",
        " to=functions.f",
    ]
    ids = encode(data.draw(st.lists(st.sampled_from(pieces), max_size=10)), tokenizer)
    ctx = context(reasoning, tool, tokenizer=tokenizer, stop=["f f"])
    whole = summary(derender(ctx, chunked([ids], "length")))
    singles = chunked([[token_id] for token_id in ids], "length")
    assert summary(derender(ctx, singles, carries_state=True)) == whole
