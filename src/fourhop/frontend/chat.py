"""`/v1/chat/completions` behind the edge: a generation as one response, or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from fourhop.frontend.answers import Answer, chat_chunk_choice, usage_of
from fourhop.frontend.derender import Delta
from fourhop.frontend.generation import Generation
from fourhop.frontend.life import Life
from fourhop.wire import sse
from fourhop.wire.generate import Usage
from fourhop.wire.openai_chat import (
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
)


@dataclass(frozen=True)
class Chat:
    """One chat request in generation. `created` is Unix time; `counts_reasoning` says that there is a parser for it."""

    request: ChatCompletionRequest
    generation: Generation
    life: Life
    model: str
    created: int
    counts_reasoning: bool

    @property
    def id(self) -> str:
        return self.generation.request.request_id

    async def whole(self) -> ChatCompletionResponse:
        """The answer in one piece. Raises FourhopError."""
        with self.life.watch():
            answers = [Answer() for _ in range(self.generation.request.sampling_params.n)]
            async with aclosing(self.generation.gains()) as gains:
                async for gain in gains:
                    answers[gain.index].add(gain.delta)
            returns_ids = self.request.return_token_ids
            response = ChatCompletionResponse(
                id=self.id,
                created=self.created,
                model=self.model,
                choices=[a.chat_choice(i, return_token_ids=returns_ids) for i, a in enumerate(answers)],
                usage=self._usage(),
                prompt_logprobs=self.generation.prompt_logprobs,
                prompt_token_ids=self.generation.request.token_ids if returns_ids else None,
                kv_transfer_params=self.generation.kv_transfer_params,
            )
            self.life.end(answers[0].finish_reason or "failed")
        return response

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Roles, deltas, finishes, usage if it was asked for, `[DONE]`. Raises FourhopError, at first or later."""
        with self.life.watch():
            is_first, finish = True, "failed"
            async with aclosing(self.generation.gains()) as gains:
                async for gain in gains:
                    if is_first:
                        for event in self._roles():
                            yield event
                        is_first = False
                    if self._is_visible(gain.delta):
                        yield self._event(gain.index, gain.delta)
                    finish = gain.delta.finish_reason or finish
            if self._wants_usage():
                yield self._encode([], self._usage())
            self.life.end(finish)
            yield sse.DONE_EVENT

    def _roles(self) -> list[bytes]:
        """One event a choice with the role and no text yet; the first carries what is wanted of the prompt."""
        delta = ChatDelta(role="assistant", content="")
        choices = range(self.generation.request.sampling_params.n)
        return [
            self._encode([ChatChunkChoice(index=index, delta=delta)], None, is_first=index == 0) for index in choices
        ]

    def _event(self, index: int, delta: Delta) -> bytes:
        choice = chat_chunk_choice(index, delta, is_first=False, return_token_ids=self.request.return_token_ids)
        return self._encode([choice], None)

    def _encode(self, choices: list[ChatChunkChoice], usage: Usage | None, *, is_first: bool = False) -> bytes:
        """An event. With usage asked for, those before the last say that theirs is null, as OpenAI's do."""
        is_finish = any(choice.finish_reason for choice in choices)
        transfer = self.generation.kv_transfer_params if is_finish else None
        chunk = ChatCompletionChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage if self._wants_usage() else UNSET,
            prompt_token_ids=self.generation.request.token_ids if is_first and self.request.return_token_ids else UNSET,
            prompt_logprobs=self.generation.prompt_logprobs or UNSET if is_first else UNSET,
            kv_transfer_params=UNSET if transfer is None else transfer,
        )
        return sse.encode_event(msgspec.json.encode(chunk))

    def _is_visible(self, delta: Delta) -> bool:
        """Whether this client sees anything of a delta: token ids alone are shown only on request."""
        text = delta.content or delta.reasoning or delta.tool_calls
        ids = self.request.return_token_ids and delta.token_ids
        return bool(text or delta.logprobs or delta.finish_reason or ids)

    def _wants_usage(self) -> bool:
        options = self.request.stream_options
        return options is not None and options.include_usage

    def _usage(self) -> Usage:
        generation = self.generation
        return usage_of(
            len(generation.request.token_ids),
            generation.num_tokens,
            reasoning_tokens=generation.num_reasoning_tokens if self.counts_reasoning else None,
            prompt_details=generation.prompt_details,
        )
