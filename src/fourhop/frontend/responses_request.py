"""A request of the responses API as the chat request that it stands for. Pure.

Refusals name fields by their path in the client's own request; `NAMES` tells what the chat's fields are called there.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fourhop.wire.errors import ClientError, client_error
from fourhop.wire.openai_chat import ChatCompletionRequest, FunctionName, NamedToolChoice
from fourhop.wire.responses import (
    RESPONSES_UNSUPPORTED_FIELDS,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    NamedFunction,
    ReasoningItem,
    ResponsesRequest,
    ResponseTool,
    TextPart,
)

NAMES = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format.schema",
}
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
INCLUDED = ("reasoning.encrypted_content",)
"""What `include` may name: thinking is never encrypted here, so there is nothing to leave out."""


def chat_of_responses(request: ResponsesRequest) -> ChatCompletionRequest:
    """The chat request. Raises ClientError for what is not supported."""
    _check(request)
    return ChatCompletionRequest(
        model=request.model,
        messages=_messages(request),
        tools=[_tool(tool) for tool in request.tools] if request.tools else None,
        tool_choice=_tool_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stream=request.stream,
        response_format=_response_format(request),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        chat_template_kwargs=request.chat_template_kwargs,
        seed=request.seed,
        cache_salt=request.cache_salt,
        priority=request.priority,
        targets=request.targets,
        request_id=request.request_id,
    )


def _check(request: ResponsesRequest) -> None:
    for name in RESPONSES_UNSUPPORTED_FIELDS:
        value = getattr(request, name)
        if value is not None and value is not False and value != 0:
            raise ClientError(f"{name}: is not supported; this server keeps no responses", param=name)
    if request.truncation == "auto":
        raise ClientError("truncation: only disabled is supported", param="truncation")
    for index, name in enumerate(request.include or []):
        if name not in INCLUDED:
            path = f"include[{index}]"
            raise ClientError(f"{path}: {name[:100]} is not supported", param=path)


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    if isinstance(request.input, str):
        return [*system, {"role": "user", "content": request.input}]
    if not request.input:
        raise ClientError("input: must not be empty", param="input")
    turns = _Turns(system)
    for index, item in enumerate(request.input):
        path = f"input[{index}]"
        turns.add(_item(item, path), path)
    return turns.messages


def _item(item: dict[str, Any], path: str) -> InputItem:
    try:
        converted: InputItem = msgspec.convert({"type": "message", **item}, InputItem)
    except msgspec.ValidationError as error:
        raise client_error(error, path) from None
    return converted


class _Turns:
    """Items become messages; thinking, text and calls of one turn of the assistant are one message."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages
        self._is_open = False

    def add(self, item: InputItem, path: str) -> None:
        if isinstance(item, ReasoningItem):
            thoughts = item.content if item.content else item.summary
            self._assistant()["reasoning_content"] = "".join(_texts(thoughts, f"{path}.content"))
        elif isinstance(item, FunctionCallItem):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            self._assistant().setdefault("tool_calls", []).append(call)
        elif isinstance(item, FunctionCallOutputItem):
            content = _content(item.output, f"{path}.output")
            self._other({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif item.role == "assistant":
            self._answer(_content(item.content, f"{path}.content"))
        else:
            self._other({"role": item.role, "content": _content(item.content, f"{path}.content")})

    def _answer(self, content: str | list[dict[str, Any]]) -> None:
        if self._is_open and (self.messages[-1]["content"] or "tool_calls" in self.messages[-1]):
            self._is_open = False
        self._assistant()["content"] = content

    def _assistant(self) -> dict[str, Any]:
        if not self._is_open:
            self.messages.append({"role": "assistant", "content": ""})
            self._is_open = True
        return self.messages[-1]

    def _other(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._is_open = False


def _content(content: str | list[TextPart], path: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    texts = _texts(content, path)
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _texts(parts: list[TextPart], path: str) -> list[str]:
    for index, part in enumerate(parts):
        if part.type not in TEXT_PARTS:
            where = f"{path}[{index}].type"
            raise ClientError(f'{where}: parts of type "{part.type[:100]}" are not supported', param=where)
        if part.text is None:
            raise ClientError(f"{path}[{index}].text: is required", param=f"{path}[{index}].text")
    return [part.text for part in parts if part.text is not None]


def _tool(tool: ResponseTool) -> dict[str, Any]:
    described = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    given = {key: value for key, value in described.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name, **given}}


def _tool_choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if isinstance(choice, NamedFunction):
        return NamedToolChoice(FunctionName(choice.name))
    return None if choice in ("auto", "none") and not request.tools else choice


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    if request.text is None or request.text.format.type == "text":
        return None
    given = request.text.format
    if given.type == "json_object":
        return {"type": "json_object"}
    if given.schema is None:
        raise ClientError("text.format.schema: is required", param="text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": given.name, "schema": given.schema}}
