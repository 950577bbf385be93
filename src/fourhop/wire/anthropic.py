"""Anthropic's messages API: request, response and stream events (`anthropic-version: 2023-06-01`).

Unknown fields are ignored, as by OpenAI-compatible servers; a known one of the wrong type is an error with its path.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fourhop.wire.errors import FourhopError
from fourhop.wire.generate import Targets


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """`signature` is empty: this server signs nothing and checks nothing."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool = False


class ImageBlock(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    """Known, and refused."""

    source: Any = None


class DocumentBlock(msgspec.Struct, frozen=True, tag_field="type", tag="document"):
    """Known, and refused."""

    source: Any = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | ImageBlock | DocumentBlock
AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class InputMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class MessageTool(msgspec.Struct, frozen=True):
    """`input_schema` is a JSON schema."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct, frozen=True):
    """`budget_tokens` is not enforced: `max_tokens` bounds thinking and answer together."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the prompt: the whole body of `/v1/messages/count_tokens`."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """`chat_template_kwargs`, `seed` and the fields after it are additions, as in the chat API."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    cache_salt: str | None = None
    priority: int | None = 0
    targets: Targets | None = None


class CountAnswer(msgspec.Struct, frozen=True):
    input_tokens: int


class MessageUsage(msgspec.Struct, frozen=True):
    """The prompt has `input_tokens` and, besides these, `cache_read_input_tokens` that came from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    content: list[AnswerBlock]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"


ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class MessageError(msgspec.Struct, frozen=True):
    error: MessageErrorDetail
    type: str = "error"


def message_error(error: FourhopError) -> MessageError:
    """An error in this API's shape, which has no field for the path of what is wrong: the message begins with it."""
    is_told = error.param is None or error.message.startswith(error.param)
    message = error.message if is_told else f"{error.param}: {error.message}"
    return MessageError(MessageErrorDetail(ERROR_TYPES.get(error.status, "api_error"), message))
