"""One rendered prompt at the token server: tokens come back, what the client gains goes out, stop strings end it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fourhop.frontend.derender import Context, Delta, Derenderer
from fourhop.frontend.life import Life
from fourhop.frontend.logprobs import prompt_texts
from fourhop.frontend.names import rename
from fourhop.frontend.render import for_engine
from fourhop.tokens.server import TokenServer
from fourhop.wire.errors import FourhopError, PeerError
from fourhop.wire.generate import ChunkChoice, GenerateChunk, GenerateRequest, PromptTokensDetails
from fourhop.wire.logprobs import PromptLogprobs


@dataclass(frozen=True)
class Gain:
    """What one choice gained."""

    index: int
    delta: Delta


class Generation:
    """The stream of one GenerateRequest. After `gains` has ended its counts are those of the whole answer;
    `prompt_logprobs` are there with the first gain.

    `names` are the client's for fields of the GenerateRequest, where they differ (`names.chat_names`).
    """

    def __init__(
        self,
        upstream: TokenServer,
        request: GenerateRequest,
        context: Context,
        life: Life,
        *,
        names: Mapping[str, str],
        first_index: int = 0,
    ) -> None:
        self.request = request
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.prompt_details: PromptTokensDetails | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.kv_transfer_params: dict[str, Any] | None = None
        self._tokenizer = context.tokenizer
        self._upstream = upstream
        self._life = life
        self._names = dict(names)
        self._first_index = first_index
        self._begun: set[int] = set()
        self._derenderers = [Derenderer.start(context, index) for index in range(request.sampling_params.n)]

    def rename(self, names: Mapping[str, str]) -> None:
        """The client's request was translated to a chat request: `names` are its own for fields of that."""
        self._names = {field: names.get(name, name) for field, name in {**names, **self._names}.items()}

    async def gains(self) -> AsyncGenerator[Gain, None]:
        """Each choice's gains in order, the last with its finish reason. Indices count from `first_index`.

        When every choice is over for the client and upstream still works on one (a stop string ended it), upstream's
        stream is closed, which aborts it there. Raises FourhopError.
        """
        unfinished = set(range(len(self._derenderers)))
        at_work = set(unfinished)
        self._life.sent()
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                await self._note(chunk)
                for choice in chunk.choices:
                    if choice.finish_reason is not None:
                        at_work.discard(choice.index)
                    if choice.index in unfinished:
                        delta = await self._fed(choice)
                        if delta.finish_reason is not None:
                            unfinished.discard(choice.index)
                        yield Gain(self._first_index + choice.index, delta)
                if at_work and not unfinished:
                    return
        if unfinished:
            raise PeerError("the token server ended its stream before every choice was finished")

    async def _chunks(self) -> AsyncGenerator[GenerateChunk, None]:
        """Upstream's chunks. A refusal names the client's own fields."""
        try:
            async with aclosing(self._upstream.generate(for_engine(self.request, self._life.traceparent))) as chunks:
                async for chunk in chunks:
                    yield chunk
        except FourhopError as error:
            rename(error, self._names)
            raise

    async def _fed(self, choice: ChunkChoice) -> Delta:
        """What a choice gained. With what was told of the prompt, the first may be much: done beside the event loop."""
        if self.prompt_logprobs is None or choice.index in self._begun:
            return self._feed(choice)
        self._begun.add(choice.index)
        return await asyncio.to_thread(self._feed, choice)

    def _feed(self, choice: ChunkChoice) -> Delta:
        delta = self._derenderers[choice.index].feed(choice, self.prompt_logprobs)
        self.num_tokens += delta.num_tokens
        self.num_reasoning_tokens += delta.num_reasoning_tokens
        self._life.num_completion_tokens += delta.num_tokens
        return delta

    async def _note(self, chunk: GenerateChunk) -> None:
        self._life.heard(chunk)
        if chunk.usage is not None:
            self.prompt_details = chunk.usage.prompt_tokens_details
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = await asyncio.to_thread(prompt_texts, chunk.prompt_logprobs, self._tokenizer)
        if chunk.kv_transfer_params is not None:
            self.kv_transfer_params = chunk.kv_transfer_params
