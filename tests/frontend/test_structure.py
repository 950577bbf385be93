"""The structure that a request asks for, as the engine gets it, and forced calls as the client gets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.derendering import context, derender_any_way, encode, shown
from fakes.toy import END_THINK, EOS, TEMPLATE_TA, TEMPLATE_TT, THINK, TOOL_CALL, write_toy_checkpoint
from fourhop.checkpoint import Checkpoint
from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.load import load_renderer
from fourhop.frontend.names import chat_names, rename
from fourhop.frontend.render import Renderer
from fourhop.wire.errors import ClientError, PeerRefused, error_from_body
from fourhop.wire.generate import FinishReason, GenerateRequest
from fourhop.wire.openai_chat import ChatCompletionRequest
from fourhop.wire.openai_completion import CompletionRequest
from fourhop.wire.structure import GrammarStart

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
}
F = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
G = {"type": "function", "function": {"name": "g", "parameters": TREE}}
BARE = {"type": "function", "function": {"name": "bare"}}
NAMED_F = {"type": "function", "function": {"name": "f"}}


def make_renderer(folder: Path, **config: Any) -> Renderer:
    template = TEMPLATE_TT if config.get("reasoning_parser") else TEMPLATE_TA
    return load_renderer(Checkpoint("toy", write_toy_checkpoint(folder, template=template)), FrontendConfig(**config))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return make_renderer(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return make_renderer(
        tmp_path_factory.mktemp("thinking"),
        reasoning_parser="qwen3",
        tool_call_parser="hermes",
        enable_auto_tool_choice=True,
    )


def make_chat(**fields: Any) -> ChatCompletionRequest:
    return msgspec.convert({"messages": [{"role": "user", "content": "hi"}], **fields}, ChatCompletionRequest)


def chat(renderer: Renderer, **fields: Any) -> GenerateRequest:
    return renderer.chat(make_chat(**fields), "r")


@pytest.mark.parametrize(
    ("fields", "outputs"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            {"json": SCHEMA},
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"regex": "a+", "json_object": False}}, {"regex": "a+", "json_object": False}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {}}, None),
        ({"response_format": {"type": "text"}, "guided_regex": None}, None),
    ],
)
def test_a_structure_reaches_the_engine_in_vllms_form(
    plain: Renderer, fields: dict[str, Any], outputs: dict[str, Any] | None
) -> None:
    rendered = chat(plain, **fields)
    assert rendered.sampling_params.structured_outputs == outputs
    assert rendered.grammar_start is None
    request = msgspec.convert({"prompt": "x", **fields}, CompletionRequest)
    assert plain.completion(request, "r")[0].sampling_params.structured_outputs == outputs


def test_a_named_tool_gives_the_schema_of_its_arguments(plain: Renderer) -> None:
    choice = {"tools": [BARE, F], "tool_choice": NAMED_F}
    assert chat(plain, **choice).sampling_params.structured_outputs == {"json": SCHEMA}
    named_bare = {"type": "function", "function": {"name": "bare"}}
    rendered = chat(plain, tools=[BARE, F], tool_choice=named_bare)
    assert rendered.sampling_params.structured_outputs == {"json": {"type": "object"}}


def test_a_required_call_gives_a_list_of_calls(plain: Renderer) -> None:
    """References inside of a tool's schema lead to the same place in the whole."""
    rendered = chat(plain, tools=[F, G], tool_choice="required", response_format={"type": "json_object"})
    outputs = rendered.sampling_params.structured_outputs
    assert outputs is not None
    schema = outputs["json"]
    assert (schema["type"], schema["minItems"], "maxItems" in schema) == ("array", 1, False)
    assert [call["properties"]["name"] for call in schema["items"]["anyOf"]] == [{"const": "f"}, {"const": "g"}]
    assert schema["$defs"]["tool_0"] == SCHEMA
    assert schema["$defs"]["tool_1"]["properties"]["root"] == {"$ref": "#/$defs/tool_1/$defs/node"}
    one = chat(plain, tools=[F], tool_choice="required", parallel_tool_calls=False).sampling_params.structured_outputs
    assert one is not None and one["json"]["maxItems"] == 1


def test_auto_and_none_leave_the_output_free(thinking: Renderer) -> None:
    for choice in ("auto", "none", None):
        assert chat(thinking, tools=[F], tool_choice=choice).sampling_params.structured_outputs is None


def test_a_grammar_begins_after_thinking(thinking: Renderer) -> None:
    wanted = {"response_format": {"type": "json_object"}}
    assert chat(thinking, **wanted).grammar_start == GrammarStart(closing_token_ids=[END_THINK])
    assert chat(thinking, include_reasoning=False, **wanted).grammar_start == GrammarStart(
        closing_token_ids=[END_THINK]
    )
    off = chat(thinking, chat_template_kwargs={"enable_thinking": False}, **wanted)
    assert (off.reasoning_ended, off.grammar_start) == (True, None)
    unopened = chat(thinking, add_generation_prompt=False, **wanted)
    assert unopened.grammar_start == GrammarStart(opening_token_id=THINK, closing_token_ids=[END_THINK])


def test_a_call_may_stand_in_place_of_the_answer(thinking: Renderer) -> None:
    start = chat(thinking, tools=[F], response_format={"type": "json_object"}).grammar_start
    assert start == GrammarStart(closing_token_ids=[END_THINK], free_token_ids=[TOOL_CALL])
    start = chat(thinking, tools=[F], tool_choice="none", response_format={"type": "json_object"}).grammar_start
    assert start == GrammarStart(closing_token_ids=[END_THINK])


def test_a_refused_grammar_is_named_as_the_client_named_it() -> None:
    body = b'{"error": {"message": "sampling_params.structured_outputs.json: no", "type": "BadRequestError", '
    body += b'"param": "sampling_params.structured_outputs.json", "code": 400}}'
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"response_format": schema}, "response_format.json_schema.schema"),
        ({"guided_json": {}}, "guided_json"),
        ({"tools": [F], "tool_choice": "required"}, "tools"),
    ]
    for fields, param in cases:
        error: PeerRefused | ClientError = error_from_body(400, body)
        rename(error, chat_names(make_chat(**fields)))
        assert (error.param, error.message) == (param, f"{param}: no")


CALLS = '[{"name": "f", "parameters": {"a": 1}},\n {"name": "g", "parameters": {"root": {"next": {}}}}]'


def ended(text: str, finish: FinishReason) -> list[int]:
    return [*encode(text), *([EOS] if finish == "stop" else [])]


@pytest.mark.parametrize(
    ("text", "finish", "calls", "reason"),
    [
        (CALLS, "stop", [("f", '{"a": 1}'), ("g", '{"root": {"next": {}}}')], "tool_calls"),
        ('[{"name":"f","parameters":{}}]', "stop", [("f", "{}")], "tool_calls"),
        (CALLS[: CALLS.index('{"a"') + 1], "length", [("f", "{")], "length"),
        ('[{"name": "f", "parameters": {"a": "}]\\"é"}}]', "stop", [("f", '{"a": "}]\\"é"}')], "tool_calls"),
    ],
)
def test_required_calls_are_read(text: str, finish: FinishReason, calls: list[tuple[str, str]], reason: str) -> None:
    for reasoning, before, thought in ((None, "", None), ("qwen3", "<think>hm</think>", "hm")):
        ctx = context(reasoning, None, tools=[F, G], tool_choice="required")
        answer = derender_any_way(ctx, ended(before + text, finish), finish)
        assert shown(answer) == (None, thought, calls, reason)


@pytest.mark.parametrize(
    ("text", "finish", "arguments"),
    [('{"a": {"b": "}"}}', "stop", '{"a": {"b": "}"}}'), ('{"a": [1', "length", '{"a": [1'), ('"}"', "stop", '"}"')],
)
def test_a_named_call_is_the_whole_text(text: str, finish: FinishReason, arguments: str) -> None:
    """Its finish reason stays the engine's (case 50)."""
    ctx = context("qwen3", "hermes", tools=[F], tool_choice=NAMED_F)
    answer = derender_any_way(ctx, ended("<think>hm</think>\n" + text, finish), finish)
    assert shown(answer) == (None, "hm", [("f", arguments)], finish)


def test_one_call_where_only_one_is_wanted() -> None:
    ctx = context(None, None, tools=[F, G], tool_choice="required", parallel_tool_calls=False)
    assert shown(derender_any_way(ctx, encode(CALLS)))[2] == [("f", '{"a": 1}')]
