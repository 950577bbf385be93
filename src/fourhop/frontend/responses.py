"""`/v1/responses` behind the edge: a chat's generation as a response object, or as its stream of numbered events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count

import msgspec

from fourhop.frontend.blocks import Block, Blocks, Step
from fourhop.frontend.generation import Generation
from fourhop.frontend.life import Life
from fourhop.wire import sse
from fourhop.wire.errors import EngineError, FourhopError
from fourhop.wire.openai_chat import ChatFinishReason
from fourhop.wire.responses import (
    IncompleteDetails,
    InputDetails,
    ItemStatus,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningOptions,
    ReasoningText,
    Response,
    ResponsesRequest,
    ResponseUsage,
    TextOptions,
)


@dataclass(frozen=True)
class Responses:
    """One responses request in generation. `created` is Unix time."""

    request: ResponsesRequest
    id: str
    generation: Generation
    life: Life
    model: str
    created: int

    async def whole(self) -> Response:
        """The answer in one piece. Raises FourhopError."""
        with self.life.watch():
            blocks, finish = Blocks(), None
            async with aclosing(self.generation.gains()) as gains:
                async for gain in gains:
                    blocks.feed(gain.delta)
                    finish = gain.delta.finish_reason or finish
            response = self._ended(blocks, finish)
            self.life.end(finish or "failed")
        return response

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Created, in progress, the items as they grow, and the whole response at the end. Raises FourhopError."""
        with self.life.watch():
            blocks, finish, numbers = Blocks(), None, count()
            is_first = True
            async with aclosing(self.generation.gains()) as gains:
                async for gain in gains:
                    if is_first:
                        for name in ("response.created", "response.in_progress"):
                            yield _event(numbers, name, response=self._response("in_progress", []))
                        is_first = False
                    for step in blocks.feed(gain.delta):
                        for event in self._step(numbers, step):
                            yield event
                    finish = gain.delta.finish_reason or finish
            last = "incomplete" if finish == "length" else "completed"
            for step in blocks.close():
                for event in self._step(numbers, step, _status(finish)):
                    yield event
            response = self._ended(blocks, finish)
            self.life.end(finish or "failed")
            yield _event(numbers, f"response.{last}", response=response)

    def _ended(self, blocks: Blocks, finish: ChatFinishReason | None) -> Response:
        if finish == "abort":
            raise EngineError("the request was aborted before its answer was complete")
        last = len(blocks.all) - 1
        items = [self._item(block, _status(finish) if block.number == last else "completed") for block in blocks.all]
        response = self._response("incomplete" if finish == "length" else "completed", items)
        details = IncompleteDetails("max_output_tokens") if finish == "length" else None
        return msgspec.structs.replace(response, usage=self._usage(), incomplete_details=details)

    def _response(self, status: str, items: list[OutputItem]) -> Response:
        request, params = self.request, self.generation.request.sampling_params
        return Response(
            id=self.id,
            created_at=self.created,
            model=self.model,
            status=status,  # type: ignore[arg-type]
            output=items,
            instructions=request.instructions,
            tools=request.tools or [],
            tool_choice=request.tool_choice or "auto",
            parallel_tool_calls=request.parallel_tool_calls is not False,
            max_output_tokens=request.max_output_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            text=request.text or TextOptions(),
            reasoning=request.reasoning or ReasoningOptions(),
            metadata=request.metadata or {},
            user=request.user,
        )

    def _usage(self) -> ResponseUsage:
        generation = self.generation
        num_prompt, details = len(generation.request.token_ids), generation.prompt_details
        return ResponseUsage(
            input_tokens=num_prompt,
            input_tokens_details=InputDetails(details.cached_tokens if details else 0),
            output_tokens=generation.num_tokens,
            output_tokens_details=OutputDetails(generation.num_reasoning_tokens),
            total_tokens=num_prompt + generation.num_tokens,
        )

    def _item(self, block: Block, status: ItemStatus) -> OutputItem:
        """A block as an item. One that has only begun has no content yet."""
        item_id = _item_id(self.id, block)
        if block.kind == "call":
            return OutputCall(id=item_id, call_id=block.call_id, name=block.name, arguments=block.text, status=status)
        text = block.text
        if block.kind == "thinking":
            return OutputReasoning(id=item_id, content=[ReasoningText(text)] if text else [], status=status)
        return OutputMessage(id=item_id, content=[OutputText(text)] if text else [], status=status)

    def _step(self, numbers: Iterator[int], step: Step, status: ItemStatus = "completed") -> list[bytes]:
        """The events of one step of one item."""
        block = step.block
        place = {"item_id": _item_id(self.id, block), "output_index": block.number}
        part = {} if block.kind == "call" else {"content_index": 0}
        delta, done, key = _NAMES[block.kind]
        if step.kind == "piece":
            return [_event(numbers, delta, **place, **part, delta=step.text)]
        if step.kind == "begin":
            begun = msgspec.structs.replace(self._item(Block(block.number, block.kind), "in_progress"))
            if isinstance(begun, OutputCall):
                begun = msgspec.structs.replace(begun, call_id=block.call_id, name=block.name)
            added = [_event(numbers, "response.output_item.added", output_index=block.number, item=begun)]
            opened = _part(block, "")
            return (
                added
                if opened is None
                else [*added, _event(numbers, "response.content_part.added", **place, **part, part=opened)]
            )
        ended = [_event(numbers, done, **place, **part, **{key: block.text})]
        whole = _part(block, block.text)
        if whole is not None:
            ended.append(_event(numbers, "response.content_part.done", **place, **part, part=whole))
        item = self._item(block, status)
        return [*ended, _event(numbers, "response.output_item.done", output_index=block.number, item=item)]


def error_events(error: FourhopError) -> bytes:
    """How a stream ends that failed."""
    body = {"type": "error", "code": error.type, "message": error.message, "param": error.param}
    return sse.encode_event(msgspec.json.encode(body), "error")


_NAMES = {
    "thinking": ("response.reasoning_text.delta", "response.reasoning_text.done", "text"),
    "text": ("response.output_text.delta", "response.output_text.done", "text"),
    "call": ("response.function_call_arguments.delta", "response.function_call_arguments.done", "arguments"),
}
_PREFIXES = {"thinking": "rs", "text": "msg", "call": "fc"}


def _item_id(response_id: str, block: Block) -> str:
    """Stable for an answer: the response's own id and the item's number."""
    return f"{_PREFIXES[block.kind]}_{response_id.removeprefix('resp_')}_{block.number}"


def _part(block: Block, text: str) -> OutputText | ReasoningText | None:
    if block.kind == "call":
        return None
    return OutputText(text) if block.kind == "text" else ReasoningText(text)


def _status(finish: ChatFinishReason | None) -> ItemStatus:
    """Of the answer's last item."""
    return "incomplete" if finish == "length" else "completed"


def _event(numbers: Iterator[int], name: str, **fields: object) -> bytes:
    body = {"type": name, "sequence_number": next(numbers), **fields}
    return sse.encode_event(msgspec.json.encode(body), name)
