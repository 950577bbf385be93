from __future__ import annotations

from typing import Any

import pytest

from fourhop.frontend.conversation import prepare_messages, read_tools
from fourhop.wire.errors import ClientError

Message = dict[str, Any]


def call(arguments: Any) -> list[Message]:
    function = {"name": "f", "arguments": arguments}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
    ]


def refused(messages: list[Any]) -> ClientError:
    with pytest.raises(ClientError) as caught:
        prepare_messages(messages)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("text", ["", " ", None, "{}"])
def test_no_arguments_are_an_empty_object(text: str | None) -> None:
    """Case 5 (f, g)."""
    assert prepare_messages(call(text))[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_arguments_become_an_object_in_the_order_of_the_text() -> None:
    arguments = prepare_messages(call('{"b": 1, "a": {"d": 2, "c": null}}'))[1]["tool_calls"][0]["function"][
        "arguments"
    ]
    assert list(arguments) == ["b", "a"]
    assert list(arguments["a"]) == ["d", "c"]


@pytest.mark.parametrize("text", ['{"t": "abc', "[]", "null", "17", '"x"', '{"a": 1} {}'])
def test_arguments_that_are_no_object_are_refused_by_path(text: str) -> None:
    """Case 5 (a to e)."""
    assert refused(call(text)).param == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": 1}], "messages[0].role"),
        ([{"role": ""}], "messages[0].role"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": {}}], "messages[1].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "assistant", "reasoning": []}], "messages[0].reasoning"),
    ],
)
def test_wrong_shapes_are_refused_by_path(messages: list[Any], param: str) -> None:
    assert refused(messages).param == param


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_reaches_the_template_under_each_name(name: str) -> None:
    prepared = prepare_messages([{"role": "assistant", "content": "a", name: "why"}])[0]
    assert prepared["reasoning_content"] == prepared["thinking"] == "why"


def test_nulls_are_left_out_and_unknown_keys_stay() -> None:
    message = {"role": "user", "content": "a", "name": None, "weight": 1}
    assert prepare_messages([message]) == [{"role": "user", "content": "a", "weight": 1}]


def test_calls_without_content_get_an_empty_one() -> None:
    assert prepare_messages(call("{}"))[1]["content"] == ""


def test_the_request_is_not_changed() -> None:
    messages = call('{"a": 1}')
    prepare_messages(messages)
    assert messages == call('{"a": 1}')


def test_tools_are_checked() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert read_tools([tool])[0].function.name == "f"
    assert read_tools(None) == []
    for tools, param in (
        ([], "tools"),
        ([{"type": "x"}], "tools[0].type"),
        ([{"function": {}}], "tools[0].function.name"),
    ):
        with pytest.raises(ClientError) as caught:
            read_tools(tools)
        assert caught.value.param == param
