"""OpenAI's answers out of deltas. An answer that is not streamed is its deltas, collected."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import UNSET

from fourhop.frontend.derender import Delta
from fourhop.frontend.logprobs import join_logprobs
from fourhop.wire.generate import CompletionTokensDetails, FinishReason, PromptTokensDetails, Usage
from fourhop.wire.openai_chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    FunctionCall,
    ResponseMessage,
    TokenText,
    ToolCall,
    ToolCallDelta,
)
from fourhop.wire.openai_completion import CompletionChoice, CompletionChunkChoice, CompletionLogprobs


def chat_chunk_choice(
    index: int, delta: Delta, *, is_first: bool, return_token_ids: bool | None = False
) -> ChatChunkChoice:
    """One choice of a stream's event. The first delta of a choice names the role."""
    return ChatChunkChoice(
        index=index,
        delta=ChatDelta(
            role="assistant" if is_first else UNSET,
            content=UNSET if delta.content is None else delta.content,
            reasoning=UNSET if delta.reasoning is None else delta.reasoning,
            tool_calls=delta.tool_calls or UNSET,
        ),
        logprobs=delta.logprobs,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        token_ids=delta.token_ids if return_token_ids else None,
    )


def completion_chunk_choice(
    index: int, delta: Delta, *, return_token_ids: bool | None = False
) -> CompletionChunkChoice:
    """One choice of a stream's event."""
    return CompletionChunkChoice(
        index=index,
        text=delta.content or "",
        logprobs=delta.completion_logprobs,
        finish_reason=plain_finish(delta.finish_reason),
        stop_reason=delta.stop_reason,
        token_ids=delta.token_ids if return_token_ids else None,
    )


def plain_finish(reason: ChatFinishReason | None) -> FinishReason | None:
    """A plain completion has no calls, so its reason is the engine's."""
    return "stop" if reason == "tool_calls" else reason


def usage_of(
    prompt_tokens: int,
    completion_tokens: int,
    *,
    reasoning_tokens: int | None = None,
    prompt_details: PromptTokensDetails | None = None,
) -> Usage:
    """Usage with its total. `reasoning_tokens` None: there is no reasoning parser."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=prompt_details,
        completion_tokens_details=None if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens),
    )


@dataclass
class Answer:
    """Collects the deltas of one choice."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    logprobs: list[TokenText] | None = None
    completion_logprobs: CompletionLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_reasoning_tokens: int = 0

    def add(self, delta: Delta) -> None:
        self.content.append(delta.content or "")
        self.reasoning.append(delta.reasoning or "")
        for piece in delta.tool_calls:
            self._add_call(piece)
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + (delta.logprobs.content or [])
        if delta.completion_logprobs is not None:
            self.completion_logprobs = join_logprobs(self.completion_logprobs, delta.completion_logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.token_ids += delta.token_ids
        self.num_tokens += delta.num_tokens
        self.num_reasoning_tokens += delta.num_reasoning_tokens

    def chat_choice(self, index: int, *, return_token_ids: bool | None = False) -> ChatChoice:
        """Content is null beside thinking or calls alone, and "" when there is nothing at all."""
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        return ChatChoice(
            index=index,
            message=ResponseMessage(
                content=content or (None if reasoning or self.calls else ""),
                reasoning=reasoning or None,
                tool_calls=[call.whole() for call in self.calls],
            ),
            finish_reason=self.finish_reason,
            logprobs=None if self.logprobs is None else ChatLogprobs(self.logprobs),
            stop_reason=self.stop_reason,
            token_ids=self.token_ids if return_token_ids else None,
        )

    def completion_choice(self, index: int, *, return_token_ids: bool | None = False) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text="".join(self.content),
            finish_reason=plain_finish(self.finish_reason),
            logprobs=self.completion_logprobs,
            stop_reason=self.stop_reason,
            token_ids=self.token_ids if return_token_ids else None,
        )

    def _add_call(self, piece: ToolCallDelta) -> None:
        """Pieces of a call come in order, the one with its id and name first."""
        if piece.id is not UNSET:
            name = "" if piece.function.name is UNSET else piece.function.name
            self.calls.append(_Call(piece.id, name))
        if piece.function.arguments is not UNSET:
            self.calls[piece.index].arguments.append(piece.function.arguments)


@dataclass
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def whole(self) -> ToolCall:
        return ToolCall(id=self.id, function=FunctionCall(name=self.name, arguments="".join(self.arguments)))
