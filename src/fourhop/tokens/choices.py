"""n choices are n requests of one choice each, and the stream that they become."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from fourhop.tokens.server import total_usage
from fourhop.wire.generate import GenerateChunk, GenerateRequest, Usage

Chunks = AsyncGenerator[GenerateChunk, None]

BACKLOG = 16
"""Chunks of all choices together that may wait for the reader; beyond that the choices wait."""


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
    """One request for each choice, in order. The request has a seed (`with_seed`)."""
    params, seed = request.sampling_params, request.sampling_params.seed
    if params.n == 1:
        return [request]
    if seed is None:
        raise ValueError("a request needs a seed before it is split into choices")
    return [
        msgspec.structs.replace(
            request, sampling_params=msgspec.structs.replace(params, n=1, seed=choice_seed(seed, index))
        )
        for index in range(params.n)
    ]


async def merge_choices(streams: Sequence[Chunks]) -> Chunks:
    """One stream of all choices: stream i's chunks get index i, and one usage chunk of all of them comes last.

    The first error of a choice ends the whole stream with that error. Whichever way it ends, every stream is closed
    before this one is.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for chunk in only:
                yield chunk
        return
    arrived: asyncio.Queue[GenerateChunk | Exception | None] = asyncio.Queue(BACKLOG)
    readers = [asyncio.create_task(_read(index, stream, arrived)) for index, stream in enumerate(streams)]
    usages: list[Usage] = []
    last: GenerateChunk | None = None
    try:
        remaining = len(readers)
        while remaining:
            item = await arrived.get()
            if item is None:
                remaining -= 1
            elif isinstance(item, Exception):
                raise item
            elif item.usage is not None and not item.choices:
                usages.append(item.usage)
                last = item
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    if last is not None:
        yield msgspec.structs.replace(last, usage=total_usage(usages))


async def _read(index: int, stream: Chunks, arrived: asyncio.Queue[GenerateChunk | Exception | None]) -> None:
    """Carry one choice's chunks, then its end (None) or its error, to the reader of them all."""
    try:
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                await arrived.put(_reindexed(chunk, index))
    except Exception as error:  # raised again, unchanged, by the reader of the queue
        await arrived.put(error)
    else:
        await arrived.put(None)


def _reindexed(chunk: GenerateChunk, index: int) -> GenerateChunk:
    if index == 0:
        return chunk
    choices = [msgspec.structs.replace(choice, index=index) for choice in chunk.choices]
    return msgspec.structs.replace(chunk, choices=choices, prompt_token_ids=None)
