"""Conversations to compare chat templates with: as transformers takes them, and as OpenAI's clients send them."""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "z_tool",
            "description": "a/b <c> & 'd' — 中",
            "parameters": {
                "type": "object",
                "properties": {
                    "b": {"type": "integer", "description": "B"},
                    "a": {"type": "string", "enum": ["x", "y"]},
                },
                "required": ["b"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "Tell the time",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]


def say(role: str, content: Any, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(number: int, content: str, name: str = "z_tool") -> Message:
    return say("tool", content, tool_call_id=f"call{number:05}", name=name)


_USER, _SYSTEM = say("user", "hi"), say("system", "be brief")
_ASKED = say("user", "time?")
_CONTINUE = {"add_generation_prompt": False, "continue_final_message": True}

CONVERSATIONS: dict[str, tuple[list[Message], dict[str, Any]]] = {
    "user": ([say("user", "hé <|x|> 'q'\n ")], {}),
    "no generation prompt": ([_USER], {"add_generation_prompt": False}),
    "system": ([_SYSTEM, _USER], {}),
    "turns": (
        [_SYSTEM, _USER, say("assistant", " Hello "), say("user", "more"), say("assistant", "yes\n"), _USER],
        {},
    ),
    "tools": ([_ASKED], {"tools": TOOLS}),
    "system and tools": ([_SYSTEM, _ASKED], {"tools": TOOLS}),
    "called": (
        [_ASKED, say("assistant", "", tool_calls=[call(1, "z_tool", {"b": 1, "a": 'é"x'})]), result(1, "7 degrees")],
        {"tools": TOOLS},
    ),
    "called with text": (
        [
            _ASKED,
            say("assistant", "Let me see", tool_calls=[call(1, "z_tool", {"b": 1})]),
            result(1, "7 degrees"),
            say("assistant", "7"),
            _USER,
        ],
        {"tools": TOOLS},
    ),
    "two calls": (
        [
            _ASKED,
            say("assistant", "", tool_calls=[call(1, "z_tool", {"b": 1}), call(2, "now", {})]),
            result(1, "7"),
            result(2, "noon", "now"),
        ],
        {"tools": TOOLS},
    ),
    "reasoning": ([_USER, say("assistant", "b", reasoning_content="think\n"), _USER], {}),
    "reasoning and call": (
        [
            _USER,
            say("assistant", "", reasoning_content="think", tool_calls=[call(1, "now", {})]),
            result(1, "x", "now"),
        ],
        {"tools": TOOLS},
    ),
    "continued": ([_USER, say("assistant", "The answer is ")], _CONTINUE),
    "continued with an earlier text": ([_USER, say("assistant", "hi"), _USER, say("assistant", "hi")], _CONTINUE),
    "not thinking": ([_USER], {"enable_thinking": False, "thinking": False}),
    "thinking": ([_USER], {"enable_thinking": True, "thinking": True}),
    "effort": ([_USER], {"reasoning_effort": "low"}),
    "documents": ([_USER], {"documents": [{"title": "T", "text": "body"}]}),
    "two users": ([_USER, say("user", "b")], {}),
    "assistant first": ([say("assistant", "a"), _USER], {}),
}
"""Messages and what `apply_chat_template` is called with besides them."""

REQUEST_FIELDS = ("tools", "documents", "add_generation_prompt", "continue_final_message", "reasoning_effort")


def as_request(messages: list[Message], options: dict[str, Any]) -> dict[str, Any]:
    """The same as fields of a chat request: arguments are JSON text there, and template arguments have their place."""
    fields = {name: value for name, value in options.items() if name in REQUEST_FIELDS}
    kwargs = {name: value for name, value in options.items() if name not in REQUEST_FIELDS}
    return {"messages": [_as_sent(message) for message in messages], **fields, "chat_template_kwargs": kwargs}


def _as_sent(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**each, "function": {**each["function"], "arguments": json.dumps(each["function"]["arguments"])}}
        for each in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
