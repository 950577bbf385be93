"""OpenAI chat completions: request, response and stream chunk, with vLLM's extension fields."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from fourhop.wire.generate import Usage
from fourhop.wire.logprobs import PromptLogprobs
from fourhop.wire.openai import SamplingRequest

ChatFinishReason = Literal["stop", "length", "tool_calls", "abort"]


class FunctionName(msgspec.Struct, frozen=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True):
    function: FunctionName
    type: Literal["function"] = "function"


class FunctionDefinition(msgspec.Struct, frozen=True):
    """What a tool is called and takes; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class FunctionCall(msgspec.Struct, frozen=True):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatCompletionRequest(SamplingRequest, frozen=True, kw_only=True):
    """`messages` and `tools` stay as sent, so that a template sees every key, in the order of the request.

    Rendering checks their shape (`fourhop.frontend.conversation`). `max_completion_tokens` wins over `max_tokens`.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = True
    logprobs: bool | None = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False

    # Known and refused: see CHAT_UNSUPPORTED_FIELDS.
    chat_template: Any = None
    echo: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None


CHAT_UNSUPPORTED_FIELDS = (
    "chat_template",
    "echo",
    "functions",
    "function_call",
    "audio",
    "prediction",
    "web_search_options",
)


class TopTokenText(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenText(msgspec.Struct, frozen=True, gc=False):
    """One generated token as text, with its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopTokenText] = []


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenText] | None


class ResponseMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `reasoning` is always present, null when there is none."""

    role: str = "assistant"
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    refusal: str | None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ResponseMessage
    finish_reason: ChatFinishReason | None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt_token_ids` is filled when `return_token_ids` was asked for."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class FunctionCallDelta(msgspec.Struct, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of call number `index`: id, type and name come once, then pieces of the arguments' text."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta = FunctionCallDelta()


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What the message gained; fields without news are absent."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream. The usage chunk has `choices == []`; others leave `usage` out."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
