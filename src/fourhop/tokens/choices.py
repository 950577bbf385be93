"""n choices are n requests of one choice each, and the stream that they become."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from fourhop.tokens.merge import merge
from fourhop.tokens.server import total_usage
from fourhop.wire.generate import GenerateChunk, GenerateRequest, Usage

Chunks = AsyncGenerator[GenerateChunk, None]


def choice_seed(seed: int, index: int) -> int:
    """The seed of a choice, equal in every process: the request's own for choice 0, a hash of both for the others."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def with_seed(request: GenerateRequest, draw: Callable[[], int]) -> GenerateRequest:
    """The request with a seed: its own, or one that is drawn; -1 is vLLM's way to say "none"."""
    if request.sampling_params.seed not in (None, -1):
        return request
    params = msgspec.structs.replace(request.sampling_params, seed=draw())
    return msgspec.structs.replace(request, sampling_params=params)


def split_choices(request: GenerateRequest) -> list[GenerateRequest]:
    """One request for each choice, in order. The request has a seed (`with_seed`). The first looks at the prompt."""
    params, seed = request.sampling_params, request.sampling_params.seed
    if params.n == 1:
        return [request]
    if seed is None:
        raise ValueError("a request needs a seed before it is split into choices")
    choices = [
        msgspec.structs.replace(
            params,
            n=1,
            seed=choice_seed(seed, index),
            prompt_logprobs=params.prompt_logprobs if index == 0 else None,
        )
        for index in range(params.n)
    ]
    return [msgspec.structs.replace(request, sampling_params=choice) for choice in choices]


def merge_choices(streams: Sequence[Chunks], *, prompt_first: bool = False) -> Chunks:
    """One stream of all choices: stream i's chunks get index i, and one usage chunk of all of them comes last.

    With `prompt_first`, other choices wait for the chunk of choice 0 that has the prompt's log-probabilities.

    The first error of a choice ends the whole stream with that error. Whichever way it ends, every stream is closed
    before this one is.
    """
    return streams[0] if len(streams) == 1 else _merged_choices(streams, prompt_first)


async def _merged_choices(streams: Sequence[Chunks], prompt_first: bool) -> Chunks:
    usages: list[Usage] = []
    early: list[GenerateChunk] = []
    last: GenerateChunk | None = None
    async with aclosing(merge(streams)) as merged:
        async for index, chunk in merged:
            if chunk.usage is not None and not chunk.choices:
                usages.append(chunk.usage)
                last = chunk
            elif prompt_first and chunk.prompt_logprobs is None:
                early.append(_reindexed(chunk, index))
            else:
                yield _reindexed(chunk, index)
                for held in early:
                    yield held
                early, prompt_first = [], False
    if last is not None:
        yield msgspec.structs.replace(last, usage=total_usage(usages))


def _reindexed(chunk: GenerateChunk, index: int) -> GenerateChunk:
    if index == 0:
        return chunk
    choices = [msgspec.structs.replace(choice, index=index) for choice in chunk.choices]
    return msgspec.structs.replace(chunk, choices=choices, prompt_token_ids=None)
