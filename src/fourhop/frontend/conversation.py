"""The messages and tools of a chat request, checked and brought to the form that chat templates expect.

Keys that are not named here stay in the messages, so a template sees what it would see in transformers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fourhop.wire.errors import ClientError, client_error
from fourhop.wire.openai_chat import Tool

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class _ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class _HistoryFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | None = None


class _HistoryCall(msgspec.Struct, frozen=True):
    function: _HistoryFunction
    id: str | None = None
    type: Literal["function"] | None = "function"


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_HistoryCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Conversation(msgspec.Struct, frozen=True):
    messages: list[_Message]


class _Tools(msgspec.Struct, frozen=True):
    tools: list[Tool]


def read_tools(tools: list[dict[str, Any]] | None) -> list[Tool]:
    """The tools of a request as values. Raises ClientError with the path of what is wrong."""
    if tools is None:
        return []
    if not tools:
        raise ClientError("tools must not be an empty list; leave it out instead", param="tools")
    try:
        return msgspec.convert({"tools": tools}, _Tools).tools
    except msgspec.ValidationError as error:
        raise client_error(error) from None


def prepare_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages as a template reads them: null fields left out, the arguments of earlier tool calls as
    objects, the reasoning under each name that templates use. Raises ClientError with the path of what is wrong.
    """
    if not messages:
        raise ClientError("messages must hold at least one message", param="messages")
    try:
        checked = msgspec.convert({"messages": messages}, _Conversation).messages
    except msgspec.ValidationError as error:
        raise client_error(error) from None
    for index, message in enumerate(checked):
        _check_parts(message, f"messages[{index}]")
    return [_prepare(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_parts(message: _Message, path: str) -> None:
    """Only text parts: this pipeline has no image, audio or video input."""
    if not message.role:
        raise ClientError("role must not be empty", param=f"{path}.role")
    if message.content is None or isinstance(message.content, str):
        return
    for index, part in enumerate(message.content):
        if part.type != "text":
            raise ClientError(
                f'content parts of type "{part.type}" are not supported, only "text"',
                param=f"{path}.content[{index}].type",
            )
        if part.text is None:
            raise ClientError("a text part needs text", param=f"{path}.content[{index}].text")


def _prepare(message: dict[str, Any], path: str) -> dict[str, Any]:
    prepared = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in prepared:
        calls = [_parse_call(call, f"{path}.tool_calls[{j}]") for j, call in enumerate(prepared["tool_calls"])]
        # Clients send null here, and many templates call string methods on it; vLLM gives them "" as well.
        prepared = {"content": "", **prepared, "tool_calls": calls}
    reasoning = next((prepared[name] for name in _REASONING_FIELDS if name in prepared), None)
    if reasoning is None:
        return prepared
    return {"thinking": reasoning, **prepared, "reasoning_content": reasoning}


def _parse_call(call: dict[str, Any], path: str) -> dict[str, Any]:
    """A historical call with its arguments as an object, for templates that print or walk them."""
    function = call["function"]
    arguments = _parse_arguments(function.get("arguments"), f"{path}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _parse_arguments(text: str | None, path: str) -> dict[str, Any]:
    if text is None or not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ClientError(f"the arguments of an earlier tool call are not JSON: {error}", param=path) from None
    if not isinstance(value, dict):
        raise ClientError("the arguments of an earlier tool call are not a JSON object", param=path)
    return value


def as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Developer messages as system messages, for a template that knows no developer role.

    One that directly follows a system message is joined to it after a blank line, in the order of the request.
    """
    result: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "developer":
            result.append(message)
        elif result and result[-1]["role"] == "system" and "content" in result[-1] and "content" in message:
            result[-1] = {**result[-1], "content": _join(result[-1]["content"], message["content"])}
        else:
            result.append({**message, "role": "system"})
    return result


Content = str | list[dict[str, Any]]


def _join(first: Content, second: Content) -> Content:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*as_parts(first), *as_parts(second)]


def as_parts(content: Content) -> list[dict[str, Any]]:
    """Content as a list of text parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def as_text(content: Content) -> str:
    """Content as one text; parts are joined by a line break, as vLLM does."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
