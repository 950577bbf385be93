"""`/v1/completions` behind the edge: one generation for each prompt, as one response or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from fourhop.frontend.answers import Answer, completion_chunk_choice, usage_of
from fourhop.frontend.derender import Delta
from fourhop.frontend.generation import Gain, Generation
from fourhop.frontend.life import Life
from fourhop.tokens.merge import merge
from fourhop.wire import sse
from fourhop.wire.generate import Usage
from fourhop.wire.logprobs import PromptLogprobs
from fourhop.wire.openai_completion import (
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionRequest,
    CompletionResponse,
)


@dataclass(frozen=True)
class Completion:
    """One completion request in generation. Choices are numbered through: prompt i's j-th is i times n plus j."""

    request: CompletionRequest
    request_id: str
    generations: list[Generation]
    life: Life
    model: str
    created: int

    async def whole(self) -> CompletionResponse:
        """The answer in one piece. Raises FourhopError."""
        with self.life.watch():
            answers = [Answer() for _ in range(self._num_choices())]
            async with aclosing(self._gains()) as gains:
                async for _, gain in gains:
                    answers[gain.index].add(gain.delta)
            response = CompletionResponse(
                id=self.request_id,
                created=self.created,
                model=self.model,
                choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
                usage=self._usage(),
                kv_transfer_params=self.generations[0].kv_transfer_params,
            )
            self.life.end(answers[0].finish_reason or "failed")
        return response

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Deltas, finishes, usage if it was asked for, `[DONE]`. Raises FourhopError, at first or later."""
        with self.life.watch():
            new, finish = set(range(self._num_choices())), "failed"
            async with aclosing(self._gains()) as gains:
                async for _, gain in gains:
                    is_first = gain.index in new
                    if is_first or self._is_visible(gain.delta):
                        yield self._event(gain.index, gain.delta, is_first=is_first)
                    new.discard(gain.index)
                    finish = gain.delta.finish_reason or finish
            if self._wants_usage():
                yield self._encode([], self._usage())
            self.life.end(finish)
            yield sse.DONE_EVENT

    def _gains(self) -> AsyncGenerator[tuple[int, Gain], None]:
        """Of all generations, as they come. Closing it ends them all, and so does the first error of one."""
        return merge([generation.gains() for generation in self.generations])

    def _choice(self, index: int, answer: Answer) -> CompletionChoice:
        choice = answer.completion_choice(index, return_token_ids=self.request.return_token_ids)
        return msgspec.structs.replace(
            choice,
            prompt_token_ids=self._prompt(index) if self.request.return_token_ids else None,
            prompt_logprobs=self._prompt_logprobs(index),
        )

    def _event(self, index: int, delta: Delta, *, is_first: bool) -> bytes:
        """An event of one choice; its first carries what is wanted of the prompt."""
        choice = completion_chunk_choice(index, delta, return_token_ids=self.request.return_token_ids)
        if is_first:
            choice = msgspec.structs.replace(
                choice,
                prompt_token_ids=self._prompt(index) if self.request.return_token_ids else UNSET,
                prompt_logprobs=self._prompt_logprobs(index) or UNSET,
            )
        return self._encode([choice], None)

    def _encode(self, choices: list[CompletionChunkChoice], usage: Usage | None) -> bytes:
        is_finish = any(choice.finish_reason for choice in choices)
        transfer = self.generations[0].kv_transfer_params if is_finish else None
        chunk = CompletionChunk(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage if self._wants_usage() else UNSET,
            kv_transfer_params=UNSET if transfer is None else transfer,
        )
        return sse.encode_event(msgspec.json.encode(chunk))

    def _num_choices(self) -> int:
        return len(self.generations) * self._choices_per_prompt()

    def _choices_per_prompt(self) -> int:
        return self.generations[0].request.sampling_params.n

    def _prompt(self, index: int) -> list[int]:
        return self._generation(index).request.token_ids

    def _prompt_logprobs(self, index: int) -> PromptLogprobs | None:
        return None if self.request.prompt_logprobs is None else self._generation(index).prompt_logprobs

    def _generation(self, index: int) -> Generation:
        return self.generations[index // self._choices_per_prompt()]

    def _is_visible(self, delta: Delta) -> bool:
        ids = self.request.return_token_ids and delta.token_ids
        return bool(delta.content or delta.completion_logprobs or delta.finish_reason or ids)

    def _wants_usage(self) -> bool:
        options = self.request.stream_options
        return options is not None and options.include_usage

    def _usage(self) -> Usage:
        """Prompts and answers of all generations; details only where there is one prompt."""
        return usage_of(
            sum(len(generation.request.token_ids) for generation in self.generations),
            sum(generation.num_tokens for generation in self.generations),
            prompt_details=self.generations[0].prompt_details if len(self.generations) == 1 else None,
        )
