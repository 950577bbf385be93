from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from fourhop.wire.errors import client_error
from fourhop.wire.openai import UNSUPPORTED_FIELDS, SamplingRequest
from fourhop.wire.openai_chat import (
    CHAT_UNSUPPORTED_FIELDS,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    NamedToolChoice,
    ResponseMessage,
)
from fourhop.wire.openai_completion import COMPLETION_UNSUPPORTED_FIELDS, CompletionRequest


def decode(type_: Any, **fields: Any) -> Any:
    return msgspec.json.decode(json.dumps(fields).encode(), type=type_)


def test_unknown_fields_are_ignored_and_nulls_are_defaults() -> None:
    request = decode(ChatCompletionRequest, messages=[], user="me", metadata={"a": 1}, n=None, stop=None, tools=None)
    assert (request.n, request.stop, request.tools) == (None, None, None)


def test_messages_keep_their_keys_and_order() -> None:
    message = {"z": 1, "role": "user", "content": [{"b": 1, "a": {"d": 1, "c": 2}}]}
    assert json.dumps(decode(ChatCompletionRequest, messages=[message]).messages) == json.dumps([message])


@pytest.mark.parametrize("choice", ["auto", "none", "required", None])
def test_tool_choice(choice: str | None) -> None:
    assert decode(ChatCompletionRequest, messages=[], tool_choice=choice).tool_choice == choice


def test_named_tool_choice() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    request = decode(ChatCompletionRequest, messages=[], tool_choice=named)
    assert isinstance(request.tool_choice, NamedToolChoice)


@pytest.mark.parametrize(
    ("type_", "fields", "param"),
    [
        (ChatCompletionRequest, {"messages": [[]]}, "messages[0]"),
        (ChatCompletionRequest, {"messages": [], "tool_choice": "maybe"}, "tool_choice"),
        (ChatCompletionRequest, {"messages": [], "stream": "yes"}, "stream"),
        (
            ChatCompletionRequest,
            {"messages": [], "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
        ),
        (CompletionRequest, {"prompt": [[1, "a"]]}, "prompt[0][1]"),
        (CompletionRequest, {"prompt": {"a": 1}}, "prompt"),
    ],
)
def test_wrong_types_are_errors_with_a_path(type_: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        decode(type_, **fields)
    assert client_error(caught.value).param == param


def test_reasoning_is_always_in_a_message_and_deltas_hold_only_news() -> None:
    assert json.loads(msgspec.json.encode(ResponseMessage(content="a")))["reasoning"] is None
    chunk = ChatCompletionChunk(
        id="x", created=1, model="m", choices=[ChatChunkChoice(index=0, delta=ChatDelta(content="a"))]
    )
    body = json.loads(msgspec.json.encode(chunk))
    assert body["choices"][0]["delta"] == {"content": "a"}
    assert body["choices"][0]["finish_reason"] is None
    assert "usage" not in body


def test_refused_fields_are_declared() -> None:
    assert set(UNSUPPORTED_FIELDS) <= set(SamplingRequest.__struct_fields__)
    assert set(CHAT_UNSUPPORTED_FIELDS) <= set(ChatCompletionRequest.__struct_fields__)
    assert set(COMPLETION_UNSUPPORTED_FIELDS) <= set(CompletionRequest.__struct_fields__)
