"""F3: token servers that say what a test tells them to, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from fourhop.wire.errors import FourhopError
from fourhop.wire.generate import ChunkChoice, FinishReason, GenerateChunk, GenerateRequest, Usage


@dataclass
class ScriptedTokenServer:
    """Answers each request with `steps` (a step may hold several ids), then a finish and the usage.

    `trailing_finish` puts the finish on a chunk of its own. Before step `stop_before` it raises `error`, or hangs when
    there is none. `requests` are those it got; `num_open` are those it is serving; `num_aborted` were left early.
    """

    steps: Sequence[Sequence[int]]
    finish: FinishReason = "length"
    stop_reason: int | None = None
    trailing_finish: bool = False
    stop_before: int | None = None
    error: FourhopError | None = None
    moments: dict[str, float] | None = None
    requests: list[GenerateRequest] = field(default_factory=list)
    num_open: int = 0
    num_aborted: int = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        self.requests.append(request)
        self.num_open += 1
        ended = False
        try:
            for index, step in enumerate(self.steps):
                await self._pass(index)
                last = index == len(self.steps) - 1 and not self.trailing_finish
                yield self._chunk(request, list(step), finished=last, first=index == 0)
            await self._pass(len(self.steps))
            if self.trailing_finish:
                yield self._chunk(request, [], finished=True, first=False)
            num_tokens = sum(len(step) for step in self.steps)
            num_prompt = len(request.token_ids)
            ended = True
            yield GenerateChunk(
                request_id=request.request_id,
                choices=[],
                usage=Usage(num_prompt, num_tokens, num_prompt + num_tokens),
            )
        finally:
            self.num_open -= 1
            self.num_aborted += not ended

    async def _pass(self, index: int) -> None:
        await asyncio.sleep(0)
        if index == self.stop_before:
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()

    def _chunk(self, request: GenerateRequest, ids: list[int], *, finished: bool, first: bool) -> GenerateChunk:
        choice = ChunkChoice(
            token_ids=ids,
            finish_reason=self.finish if finished else None,
            stop_reason=self.stop_reason if finished else None,
        )
        moments = self.moments if first or finished else None
        return GenerateChunk(request_id=request.request_id, choices=[choice], moments=moments)
