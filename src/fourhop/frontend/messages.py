"""`/v1/messages` behind the edge: a chat's generation as an Anthropic message, or as its stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from fourhop.frontend.blocks import Block, Blocks, Step
from fourhop.frontend.generation import Generation
from fourhop.frontend.life import Life
from fourhop.wire import sse
from fourhop.wire.anthropic import (
    AnswerBlock,
    MessageAnswer,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    message_error,
)
from fourhop.wire.errors import EngineError, FourhopError
from fourhop.wire.openai_chat import ChatFinishReason


@dataclass(frozen=True)
class Messages:
    """One messages request in generation."""

    id: str
    generation: Generation
    life: Life
    model: str

    async def whole(self) -> MessageAnswer:
        """The answer in one piece. Raises FourhopError."""
        with self.life.watch():
            blocks, end = Blocks(), _End()
            async with aclosing(self.generation.gains()) as gains:
                async for gain in gains:
                    blocks.feed(gain.delta)
                    end.note(gain.delta.finish_reason, gain.delta.stop_reason)
            answer = self._answer([_whole_block(block) for block in blocks.all], end, blocks)
            self.life.end(end.reason or "failed")
        return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        """`message_start`, the blocks, `message_delta` with the end, `message_stop`. Raises FourhopError."""
        with self.life.watch():
            blocks, end, is_first = Blocks(), _End(), True
            async with aclosing(self.generation.gains()) as gains:
                async for gain in gains:
                    if is_first:
                        yield _event("message_start", message=self._answer([], None, blocks))
                        is_first = False
                    for step in blocks.feed(gain.delta):
                        yield _step_event(step)
                    end.note(gain.delta.finish_reason, gain.delta.stop_reason)
            for step in blocks.close():
                yield _step_event(step)
            last = self._answer([], end, blocks)
            delta = {"stop_reason": last.stop_reason, "stop_sequence": last.stop_sequence}
            yield _event("message_delta", delta=delta, usage=last.usage)
            self.life.end(end.reason or "failed")
            yield _event("message_stop")

    def _answer(self, content: list[AnswerBlock], end: _End | None, blocks: Blocks) -> MessageAnswer:
        """The message; without `end` as it is at its beginning."""
        cached = self.generation.prompt_details.cached_tokens if self.generation.prompt_details else 0
        return MessageAnswer(
            id=self.id,
            model=self.model,
            content=content,
            usage=MessageUsage(
                input_tokens=len(self.generation.request.token_ids) - cached,
                output_tokens=self.generation.num_tokens,
                cache_read_input_tokens=cached,
            ),
            stop_reason=None if end is None else end.stop_reason(has_calls=any(b.kind == "call" for b in blocks.all)),
            stop_sequence=None if end is None else end.stop_sequence(),
        )


def error_events(error: FourhopError) -> bytes:
    """How a stream ends that failed."""
    body = message_error(error)
    return sse.encode_event(msgspec.json.encode(body), "error")


@dataclass
class _End:
    """How the choice ended."""

    reason: ChatFinishReason | None = None
    stopped_by: str | int | None = None

    def note(self, reason: ChatFinishReason | None, stopped_by: str | int | None) -> None:
        if reason is not None:
            self.reason, self.stopped_by = reason, stopped_by

    def stop_reason(self, *, has_calls: bool) -> StopReason:
        if self.reason == "abort":
            raise EngineError("the request was aborted before its answer was complete")
        if self.reason == "length":
            return "max_tokens"
        if has_calls:
            return "tool_use"
        return "stop_sequence" if self.stop_sequence() is not None else "end_turn"

    def stop_sequence(self) -> str | None:
        return self.stopped_by if isinstance(self.stopped_by, str) else None


def _whole_block(block: Block) -> AnswerBlock:
    """Arguments that the limit cut off are no JSON object: they are given as none."""
    if block.kind == "thinking":
        return ThinkingBlock(block.text)
    if block.kind == "text":
        return TextBlock(block.text)
    try:
        arguments = msgspec.json.decode(block.text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError):
        arguments = {}
    return ToolUseBlock(block.call_id, block.name, arguments)


def _empty_block(block: Block) -> AnswerBlock:
    if block.kind == "thinking":
        return ThinkingBlock("")
    return TextBlock("") if block.kind == "text" else ToolUseBlock(block.call_id, block.name, {})


_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _step_event(step: Step) -> bytes:
    if step.kind == "begin":
        return _event("content_block_start", index=step.block.number, content_block=_empty_block(step.block))
    if step.kind == "end":
        return _event("content_block_stop", index=step.block.number)
    type_, field = _DELTAS[step.block.kind]
    return _event("content_block_delta", index=step.block.number, delta={"type": type_, field: step.text})


def _event(name: str, **fields: object) -> bytes:
    return sse.encode_event(msgspec.json.encode({"type": name, **fields}), name)
