"""OpenAI's responses API: request, response and output items. Stateless: nothing is stored, every turn brings its past.

Unknown fields are ignored; fields that are known and not supported are named in `RESPONSES_UNSUPPORTED_FIELDS`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fourhop.wire.generate import Targets


class TextPart(msgspec.Struct, frozen=True):
    """A part of an input message: `input_text` or `output_text`."""

    type: str
    text: str | None = None


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart]


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[TextPart]


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    content: list[TextPart] | None = None
    summary: list[TextPart] = []


InputItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem


class ResponseTool(msgspec.Struct, frozen=True):
    name: str
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    name: str
    type: Literal["function"] = "function"


class TextFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct, frozen=True):
    format: TextFormat = TextFormat()


class ReasoningOptions(msgspec.Struct, frozen=True):
    """`summary` is accepted: thinking comes whole, as `reasoning_text`."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`input` is a text or a list of items; an item without `type` is a message.

    `store` is accepted and nothing is stored. `chat_template_kwargs` and the fields after it are additions, as in the
    chat API.
    """

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = True
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = False
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    seed: int | None = None
    cache_salt: str | None = None
    priority: int | None = 0
    targets: Targets | None = None
    request_id: str | None = None

    # Known and refused: see RESPONSES_UNSUPPORTED_FIELDS.
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    top_logprobs: Any = None


RESPONSES_UNSUPPORTED_FIELDS = (
    "previous_response_id",
    "conversation",
    "background",
    "prompt",
    "max_tool_calls",
    "top_logprobs",
)


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: ItemStatus
    role: str = "assistant"


class OutputReasoning(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    content: list[ReasoningText]
    status: ItemStatus
    summary: list[Any] = []
    encrypted_content: str | None = None


class OutputCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The response, with what the request asked for as OpenAI echoes it."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[OutputItem]
    object: str = "response"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    instructions: str | None = None
    tools: list[ResponseTool] = []
    tool_choice: str | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    metadata: dict[str, str] = {}
    truncation: str = "disabled"
    store: bool = False
    previous_response_id: str | None = None
    user: str | None = None
