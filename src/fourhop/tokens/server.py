"""`TokenServer`: what an engine, a remote engine, a stock vLLM and the router all are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from fourhop.wire.generate import ChunkChoice, GenerateChoice, GenerateChunk, GenerateRequest, GenerateResponse, Usage
from fourhop.wire.logprobs import ChoiceLogprobs, TokenLogprob


class TokenServer(Protocol):
    """Generates tokens for a rendered prompt. Everything below the frontend is one of these.

    Contract of the iterator that `generate` returns, held by `tests/contracts/token_server.py`:

    - Each choice yields token deltas in order and exactly one chunk with a finish reason, and nothing after that.
    - The last chunk has `choices == []` and the usage of all choices.
    - `prompt_logprobs`, if they are asked for, come once, with the first chunk that has a choice.
    - It ends either that way or by raising a FourhopError; it never just stops, and it never takes unbounded time.
    - A request that is refused raises before the first chunk.
    - Closing the iterator (`aclose`, or cancelling the task in it) aborts the request everywhere and returns once the
      abort is on its way; blocks are freed soon after.
    - `request_id` is echoed, never used as an internal key: two requests may carry the same one.
    """

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]: ...


async def collect(chunks: AsyncIterator[GenerateChunk], *, model: str | None, created: int) -> GenerateResponse:
    """The whole answer of a stream: what is not streamed is a stream that was collected."""
    builders: dict[int, _Choice] = {}
    request_id, usage, transfer, prompt_ids, prompt_logprobs = "", None, None, None, None
    async for chunk in chunks:
        request_id = chunk.request_id
        usage = chunk.usage or usage
        transfer = chunk.kv_transfer_params or transfer
        prompt_ids = chunk.prompt_token_ids or prompt_ids
        prompt_logprobs = chunk.prompt_logprobs or prompt_logprobs
        for delta in chunk.choices:
            builders.setdefault(delta.index, _Choice()).add(delta)
    return GenerateResponse(
        request_id=request_id,
        model=model,
        created=created,
        choices=[builder.build(index) for index, builder in sorted(builders.items())],
        usage=usage,
        prompt_logprobs=prompt_logprobs,
        prompt_token_ids=prompt_ids,
        kv_transfer_params=transfer,
    )


class _Choice:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: ChunkChoice | None = None

    def add(self, delta: ChunkChoice) -> None:
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs += delta.logprobs.content
        if delta.finish_reason is not None:
            self.finish = delta

    def build(self, index: int) -> GenerateChoice:
        return GenerateChoice(
            index=index,
            token_ids=self.token_ids,
            finish_reason=self.finish.finish_reason if self.finish else None,
            stop_reason=self.finish.stop_reason if self.finish else None,
            logprobs=ChoiceLogprobs(self.logprobs) if self.logprobs else None,
        )


def total_usage(usages: list[Usage]) -> Usage:
    """The usage of a request from those of its choices: the prompt counts once, completions add up."""
    first = usages[0]
    completion = sum(usage.completion_tokens for usage in usages)
    return Usage(
        prompt_tokens=first.prompt_tokens,
        completion_tokens=completion,
        total_tokens=first.prompt_tokens + completion,
        prompt_tokens_details=first.prompt_tokens_details,
    )
