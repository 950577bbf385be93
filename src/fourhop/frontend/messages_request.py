"""An Anthropic messages request as the chat request that it stands for. Pure.

Every refusal names the field by its path in the client's own request: `NAMES` tells what the chat's fields are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fourhop.wire.anthropic import (
    Block,
    CountRequest,
    InputMessage,
    MessagesRequest,
    MessageTool,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from fourhop.wire.errors import ClientError
from fourhop.wire.openai_chat import ChatCompletionRequest, FunctionName, NamedToolChoice

NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "messages": "messages"}


def chat_of_messages(request: MessagesRequest, switches: Sequence[str]) -> ChatCompletionRequest:
    """The chat request. `switches` are the template arguments that turn thinking on or off.

    Raises ClientError for a block that is not supported.
    """
    return msgspec.structs.replace(
        chat_of_prompt(request, switches),
        stream=request.stream,
        max_completion_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        cache_salt=request.cache_salt,
        priority=request.priority,
        targets=request.targets,
    )


def chat_of_prompt(request: CountRequest, switches: Sequence[str]) -> ChatCompletionRequest:
    """The part of a chat request that decides its prompt."""
    choice = request.tool_choice
    return ChatCompletionRequest(
        model=request.model,
        messages=[*_system(request), *_messages(request.messages)],
        tools=[_tool(tool) for tool in request.tools] if request.tools else None,
        tool_choice=_tool_choice(choice, has_tools=bool(request.tools)),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        chat_template_kwargs={**_thinking(request, switches), **(request.chat_template_kwargs or {})} or None,
    )


def _system(request: CountRequest) -> list[dict[str, Any]]:
    if not request.system:
        return []
    content = request.system if isinstance(request.system, str) else _parts(request.system)
    return [{"role": "system", "content": content}]


def _messages(messages: list[InputMessage]) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}].content"
        if isinstance(message.content, str):
            result.append({"role": message.role, "content": message.content})
        elif message.role == "user":
            result += _user(message.content, path)
        else:
            result.append(_assistant(message.content, path))
    return result


def _user(blocks: list[Block], path: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before what the user says."""
    results: list[dict[str, Any]] = []
    texts: list[TextBlock] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            content = _result(block, f"{path}[{index}]")
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, TextBlock):
            texts.append(block)
        else:
            _refuse(block, f"{path}[{index}]")
    return [*results, *([{"role": "user", "content": _parts(texts)}] if texts or not results else [])]


def _assistant(blocks: list[Block], path: str) -> dict[str, Any]:
    texts: list[TextBlock] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            _refuse(block, f"{path}[{index}]")
    message: dict[str, Any] = {"role": "assistant", "content": _parts(texts) if texts else ""}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _result(block: ToolResultBlock, path: str) -> str | list[dict[str, Any]]:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    texts: list[TextBlock] = []
    for index, part in enumerate(block.content):
        if not isinstance(part, TextBlock):
            _refuse(part, f"{path}.content[{index}]")
        else:
            texts.append(part)
    return _parts(texts) if texts else ""


def _parts(texts: Sequence[TextBlock]) -> str | list[dict[str, Any]]:
    """One text as a text, for templates that know no parts."""
    if len(texts) == 1:
        return texts[0].text
    return [{"type": "text", "text": block.text} for block in texts]


def _tool(tool: MessageTool) -> dict[str, Any]:
    description = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **description, "parameters": tool.input_schema}}


def _tool_choice(choice: ToolChoice | None, *, has_tools: bool) -> Any:
    if choice is None or (choice.type in ("auto", "none") and not has_tools):
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise ClientError("tool_choice.name: is required with type tool", param="tool_choice.name")
        return NamedToolChoice(FunctionName(choice.name))
    return "required" if choice.type == "any" else choice.type


def _thinking(request: CountRequest, switches: Sequence[str]) -> dict[str, bool]:
    """The template's own switches, if the request says anything of thinking."""
    if request.thinking is None:
        return {}
    return dict.fromkeys(switches, request.thinking.type != "disabled")


def _refuse(block: Block, path: str) -> None:
    tag = type(block).__struct_config__.tag
    raise ClientError(f'{path}: blocks of type "{tag}" are not supported here', param=path)
