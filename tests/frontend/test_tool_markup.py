"""Faults that people met in tool-call markup, family by family (cases 41, 43, 44, 46, 47, 49)."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fakes.derendering import check_every_cut, chunked, context, derender, marked_toy, shown
from fakes.families import FAMILIES, Mark, Written, encode
from fourhop.frontend.answers import Answer
from fourhop.wire.generate import FinishReason


def answer(parser: str, written: Written | str, *, tools: Any = None, **request: Any) -> Answer:
    """The answer in all cuts, with the family's markers as tokens."""
    marks = tuple(sorted({mark for family in FAMILIES.values() if family.parser == parser for mark in family.marks}))
    tokenizer = marked_toy(marks)
    pieces = [written] if isinstance(written, str) else written
    pieces = [part for piece in pieces for part in _split(piece, marks)]
    offered = {"tools": tools} if tools else {}
    return check_every_cut(
        context(None, parser, tokenizer=tokenizer, **offered, **request), encode(pieces, tokenizer), step=2
    )


def _split(text: str, marks: tuple[str, ...]) -> list[str]:
    """The text with its markers apart."""
    if not marks:
        return [text]
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text)
    return [Mark(part) if part in marks else part for part in parts]


def result(parser: str, written: Written | str, **request: Any) -> tuple[str | None, list[tuple[str, str]]]:
    content, _, calls, _ = shown(answer(parser, written, **request))
    return content, calls


# Calls without arguments (case 41)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("glm45", "<tool_call>now</tool_call>"),
        ("glm45", "<tool_call>now\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=now></function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call><function=now></tool_call>"),
        ("qwen3_coder", "<function=now>\n</function>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>'),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
            "<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>",
        ),
        ("openai", "<|channel|>commentary to=functions.now<|message|><|call|>"),
        ("llama3_json", '{"name": "now", "parameters": {}}'),
        ("llama3_json", '{"name": "now"}'),
        ("pythonic", "[now()]"),
        ("pythonic", " [ now ( ) ] "),
        ("mistral", "[TOOL_CALLS]now{}"),
    ],
)
def test_a_call_without_arguments_has_an_empty_object(parser: str, text: str) -> None:
    """Case 41."""
    assert result(parser, text)[1] == [("now", "{}")]


@pytest.mark.parametrize(
    ("parser", "text", "content"),
    [
        ("glm45", "<tool_call>no", "no"),
        ("qwen3_coder", "<tool_call>\n<function=no", "no"),
        ("mistral", "[TOOL_CALLS]no", "no"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>no", "no"),
        ("llama3_json", '{"name": "no', '{"name": "no'),
        ("pythonic", "[no", "[no"),
        ("pythonic", "[no(a", "[no(a"),
        ("phi4_mini_json", 'functools[{"na', 'functools[{"na'),
    ],
)
def test_a_name_that_was_cut_is_content(parser: str, text: str, content: str) -> None:
    """Case 41: no call of the name so far."""
    assert result(parser, text) == (content, [])


# Bare JSON (case 43)


@pytest.mark.parametrize("glue", [";", "; ", ";\n", "\n", "", ", "])
@pytest.mark.parametrize("parser", ["llama3_json", "llama4_json"])
def test_bare_calls_are_found_in_order(parser: str, glue: str) -> None:
    """Case 43 (b, c, f)."""
    text = f'{{"name":"f","parameters":{{"q":"a;b"}}}}{glue}{{"name":"g","arguments":{{"n":1}}}}'
    assert result(parser, text) == (None, [("f", '{"q":"a;b"}'), ("g", '{"n":1}')])


def test_nested_arguments_are_no_calls() -> None:
    """Case 43 (a)."""
    text = '{"name":"f","parameters":{"r":{"a":{"b":1}}}}'
    assert result("llama3_json", text)[1] == [("f", '{"r":{"a":{"b":1}}}')]


def test_prose_after_a_call_changes_nothing() -> None:
    """Case 43 (d): the call counts, and text after calls is left out in every family."""
    text = '{"name":"f","parameters":{}} all done {f}, ok?'
    assert result("llama3_json", text) == (None, [("f", "{}")])
    assert result("pythonic", "[f(a=1)] all done [g(b=2)]") == (None, [("f", '{"a": 1}')])
    assert result("mistral", "[TOOL_CALLS]f[ARGS]{} done") == (None, [("f", "{}")])


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", '{"weather":"fine"}'),
        ("llama3_json", '{"note":1}'),
        ("llama3_json", "{"),
        ("llama3_json", 'Well, {"name":"f","parameters":{}}'),
        ("llama3_json", " \n"),
        ("granite", '[{"note":1}]'),
        ("granite", "[1, 2]"),
        ("granite", "[]"),
        ("xlam", "```python\nx = {}\n```"),
        ("xlam", "```json\n{}\n```"),
        ("phi4_mini_json", "functools is a module"),
        ("pythonic", "[1] is a footnote"),
        ("pythonic", "[see](https://x.y/f(a=1))"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[x for x in y]"),
        ("pythonic", "[]"),
        ("pythonic", "[f(a.b=1)]"),
        ("pythonic", "f(a=1)"),
    ],
)
def test_text_that_never_becomes_a_call_is_content(parser: str, text: str) -> None:
    """Cases 43 (e) and 49: nothing is swallowed, nothing waits beyond the end."""
    assert result(parser, text) == (text, [])


def test_an_object_that_is_no_call_is_content_also_after_calls() -> None:
    assert result("granite", '[{"name":"f","arguments":{}}, {"note":1}]') == ('{"note":1}]', [("f", "{}")])


# Mistral (case 44)


def test_mistral_calls_with_arguments_markers() -> None:
    """Case 44: the marker is in neither the name nor the arguments, and text behind a call is no call."""
    text = '[TOOL_CALLS]peek[ARGS]{"p":"/a b"}[TOOL_CALLS]peek[ARGS]{"p":"c"} so'
    assert result("mistral", text) == (None, [("peek", '{"p":"/a b"}'), ("peek", '{"p":"c"}')])


def test_mistral_ids_have_nine_letters_or_digits() -> None:
    """Case 44: of both forms, streamed or not; an id of the model's own is kept."""
    for text in ('[TOOL_CALLS][{"name":"f","arguments":{}}]', "[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]f{}"):
        (call,) = answer("mistral", text).calls
        assert re.fullmatch("[a-zA-Z0-9]{9}", call.id)
    (call,) = answer("mistral", "[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}").calls
    assert (call.id, call.name) == ("a1B2c3D4e", "f")


@pytest.mark.parametrize("text", ["[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS]two words{}", '[TOOL_CALLS][{"n":1}]'])
def test_mistral_markup_that_is_no_call_is_content(text: str) -> None:
    content, calls = result("mistral", text)
    assert calls == [] and content == text.removeprefix("[TOOL_CALLS]").removeprefix("[ARGS]")


# Kimi


def test_kimi_ids_are_the_head() -> None:
    """vLLM protocol 10.2: the client has to repeat it in the next turn."""
    begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    heads = ["functions.f:0", " functions.a.b-c:12 ", "functions.g", "h:3", "k"]
    text = "".join(f"{begin}{head}{middle}{{}}{end}" for head in heads)
    calls = answer("kimi_k2", f"<|tool_calls_section_begin|>{text}<|tool_calls_section_end|> x").calls
    assert [call.name for call in calls] == ["f", "a.b-c", "g", "h", "k"]
    assert [call.id for call in calls[:2]] == ["functions.f:0", "functions.a.b-c:12"]
    assert all(call.id.startswith("chatcmpl-tool-") for call in calls[2:])


# DeepSeek (case 46)

V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
V31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


@pytest.mark.parametrize("arguments", ['{"a":-3}', '{"z": 906.5}', '{"a":"```"}', '{"a":{"b":[1,{}]}}'])
def test_deepseek_arguments_are_as_written(arguments: str) -> None:
    """Case 46, and 40 with numbers at the end: no fence, no part of a marker."""
    assert result("deepseek_v3", V3.replace("{}", arguments)) == (None, [("f", arguments)])
    assert result("deepseek_v31", V31.replace("{}", arguments)) == (None, [("f", arguments)])


def test_a_layout_of_another_version_is_no_call() -> None:
    """Case 46: never a tool named `function`."""
    assert result("deepseek_v31", V3) == ("functionf\n```json\n{}\n```", [])
    assert result("deepseek_v3", V31) == ("f{}", [])


DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="city" string="true">Oslo'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">7</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)


def test_dsml_states_what_is_a_string() -> None:
    """Case 49: no part of the closing tag is in the value, wherever it is cut. The tool's types do not matter."""
    assert result("deepseek_v32", DSML) == (None, [("f", '{"city": "Oslo", "n": 7}')])
    assert result("deepseek_v32", DSML.replace(">Oslo<", ">7<"))[1] == [("f", '{"city": "7", "n": 7}')]
    assert result("deepseek_v32", DSML.replace(">7<", ">[1, null]<"))[1] == [("f", '{"city": "Oslo", "n": [1, null]}')]


def test_dsml_also_where_its_word_is_a_special_token() -> None:
    """The word alone is in the vocabulary, so its tags are text around a token."""
    tokenizer = marked_toy(("｜DSML｜",))
    ids = encode(_split(DSML, ("｜DSML｜",)), tokenizer)
    ctx = context(None, "deepseek_v32", tokenizer=tokenizer)
    assert shown(check_every_cut(ctx, ids))[2] == [("f", '{"city": "Oslo", "n": 7}')]


# Types from the schema (case 47)

SCHEMA = {
    "zip": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "ok": {"type": "boolean"},
    "m": {"type": ["string", "null"]},
    "o": {"type": "object"},
    "l": {"anyOf": [{"type": "array"}, {"type": "null"}]},
    "e": {"enum": [1, 2, "a"]},
    "r": {"$ref": "#/$defs/point"},
    "u": {},
}
TYPED = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": SCHEMA, "$defs": {"point": {"type": "object"}}},
        },
    }
]

VALUES = [
    ("zip", "00742", "00742"),
    ("zip", "12", "12"),
    ("zip", "null", "null"),
    ("zip", "<b>&amp;", "<b>&amp;"),
    ("zip", "\n\nx\n", "\n\nx\n"),
    ("zip", "", ""),
    ("n", "7", 7),
    ("n", " -7\n", -7),
    ("n", "7.0", 7),
    ("n", "next week", "next week"),
    ("n", "007", "007"),
    ("n", "7.5", "7.5"),
    ("n", "true", "true"),
    ("x", "7.5e3", 7500),
    ("x", "1/2", "1/2"),
    ("ok", "True", True),
    ("ok", "false", False),
    ("ok", "maybe", "maybe"),
    ("ok", "1", "1"),
    ("m", "null", None),
    ("m", "12", "12"),
    ("m", "nul", "nul"),
    ("m", "nullable", "nullable"),
    ("o", '{"k":1}', {"k": 1}),
    ("o", "{'k': True, 'n': None}", {"k": True, "n": None}),
    ("o", "not json", "not json"),
    ("o", '{"k":1', '{"k":1'),
    ("o", '{"k":1} x', '{"k":1} x'),
    ("l", "[1, [2]]", [1, [2]]),
    ("l", "None", None),
    ("l", "{}", "{}"),
    ("e", "a", "a"),
    ("e", "1", "1"),
    ("r", '{"x": 1}', {"x": 1}),
    ("u", "[1]", [1]),
    ("u", "1", "1"),
    ("u", "[see below", "[see below"),
    ("other", "00742", "00742"),
]


@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_values_get_the_type_of_the_schema(key: str, text: str, value: Any) -> None:
    """Case 47: nothing is guessed, and what cannot be converted stays a string."""
    written = {
        "qwen3_coder": f"<tool_call>\n<function=f\n>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n"
        "</tool_call>",
        "glm45": f"<tool_call>f\n<arg_key> {key} </arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "minimax_m2": f'<minimax:tool_call><invoke name="f"><parameter name="{key}">{text}</parameter></invoke>'
        "</minimax:tool_call>",
    }
    for parser, output in written.items():
        content, calls = result(parser, output, tools=TYPED)
        assert (content, [name for name, _ in calls]) == (None, ["f"])
        assert json.loads(calls[0][1]) == {key: value}


def test_a_long_value_that_is_not_what_it_should_be_is_a_string() -> None:
    """Whatever is too long to wait for: a string if its beginning is no list or object."""
    for key, text in [("n", "9" * 80), ("ok", "x" * 300), ("o", "{'k' 'v'}" + "x" * 300), ("u", "[" + "word " * 60)]:
        output = f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"
        assert json.loads(result("glm45", output, tools=TYPED)[1][0][1]) == {key: text}


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_mistake_late_in_a_long_object_breaks_the_call_off(finish: FinishReason) -> None:
    """It was streamed when it still was an object: the call is not complete, and what follows it is not lost."""
    item = '"' + "x" * 250 + '"'
    text = f'<tool_call>f<arg_key>o</arg_key><arg_value>{{"k": {item}, oops}}</arg_value></tool_call>'
    marks = FAMILIES["glm45"].marks
    tokenizer = marked_toy(marks)
    ctx = context(None, "glm45", tokenizer=tokenizer, tools=TYPED)
    ids = encode(_split(text, marks), tokenizer) + ([257] if finish == "stop" else [])
    _, _, calls, reason = shown(derender(ctx, chunked([ids], finish)))
    assert (calls, reason) == ([("f", f'{{"o": {{"k": {item}, ')], finish)


def test_unusual_schemas_break_nothing() -> None:
    circle: dict[str, Any] = {"anyOf": [{"$ref": "#/properties/a"}, {"$ref": "#/properties/a"}]}
    for schema in (circle, {"type": 7}, {"type": [None, "integer"]}, {"enum": 3}, {"$ref": 5}, {"const": [1]}, 7, None):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
        output = "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>"
        assert result("glm45", output, tools=tools)[1] == [("f", '{"a": "x"}')]


# Tags


def test_calls_are_found_where_parts_of_the_tags_are_missing() -> None:
    inner = "<function=f>\n<parameter=a>\n1\n</parameter>\n"
    for text in (f"<tool_call>\n{inner}</tool_call>", f"{inner}</function>", f"<tool_call>{inner}</function>"):
        assert result("qwen3_coder", text)[1] == [("f", '{"a": "1"}')]


@pytest.mark.parametrize("body", ["I do not know", "two words\n", "<b>", '{"name":"f"}'])
def test_a_tag_without_a_tools_name_is_content(body: str) -> None:
    assert result("glm45", f"<tool_call>{body}</tool_call>") == (body, [])


def test_text_between_a_sections_beginning_and_its_calls_is_content() -> None:
    text = "<｜tool▁calls▁begin｜>\nhm, {x} \n" + V31.removeprefix("<｜tool▁calls▁begin｜>")
    assert result("deepseek_v31", text) == ("hm, {x} \n", [("f", "{}")])


# Python


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("a=1, b='x'", {"a": 1, "b": "x"}),
        ("a = -1.5e3 ,", {"a": -1500}),
        ("a=[1, (2, 3), {'k': None}]", {"a": [1, [2, 3], {"k": None}]}),
        ("a={'x': True, 1: false, None: \"]\",}", {"a": {"x": True, "1": False, "null": "]"}}),
        (r"a='it\'s \x41\u00e9\n\\ \q'", {"a": "it's Aé\n\\ \\q"}),
        ("a='a\"b', b=\"it's\"", {"a": 'a"b', "b": "it's"}),
        ("a=0x1F, b=1_000, c=.5, d=5., e=+3", {"a": 31, "b": 1000, "c": 0.5, "d": 5.0, "e": 3}),
        ("a=[], b={}, c=()", {"a": [], "b": {}, "c": []}),
        (r"a='\ud83d\ude42\0\101'", {"a": "🙂\0A"}),
        ("größe='中'", {"größe": "中"}),
    ],
)
def test_python_literals_become_json(source: str, arguments: dict[str, Any]) -> None:
    (call,) = result("pythonic", f"[f({source})]")[1]
    assert (call[0], json.loads(call[1])) == ("f", arguments)


@pytest.mark.parametrize(
    "value", ["g()", "x", "1 + 2", "f'{x}'", "'a' 'b'", "[1", "{1, 2}", "007", "nan", '"""a"""', "'\\x4'"]
)
def test_what_is_no_literal_breaks_the_call_off(value: str) -> None:
    """Its name is out already; it never counts as complete."""
    content, _, calls, finish = shown(answer("pythonic", f"[f(a={value}), g(b=1)]"))
    assert (content, [name for name, _ in calls], finish) == (None, ["f"], "length")


# Harmony


def test_harmony_messages() -> None:
    """vLLM protocol 10.2: thinking, a preamble, a call, the answer; by the header alone."""
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>assistant<|channel|>analysis to=browser.search code<|message|>{"q"}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>Done {x}.<|return|>"
    )
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
    expected = ("Let me see.Done {x}.", 'hm{"q"}', [("f", '{"a": 1}'), ("g", "{}")], "length")
    for tokenizer in (marked_toy(marks), marked_toy(())):
        ids = encode(_split(text, marks), tokenizer)
        for reasoning, tool in (("openai_gptoss", "openai"), (None, "openai")):
            ctx = context(reasoning, tool, tokenizer=tokenizer)
            assert shown(check_every_cut(ctx, ids, step=11)) == expected
        without = shown(
            derender(context("openai_gptoss", "openai", tokenizer=tokenizer, tools=None), chunked([ids], "length"))
        )
        assert without[:3] == ('Let me see.{"a": 1}{}Done {x}.', 'hm{"q"}', [])


def test_harmony_header_may_begin_with_the_recipient() -> None:
    assert result("openai", " to=functions.f<|channel|>commentary<|message|>{}<|call|>") == (None, [("f", "{}")])
    assert result("openai", " to be or not") == (" to be or not", [])
    assert result("openai", " to=f") == (" to=f", [])
