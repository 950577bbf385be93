"""Several streams as one, in the order in which things arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from fourhop.service.tasks import end_tasks

T = TypeVar("T")

BACKLOG = 16
"""Items of all streams together that may wait for the reader; beyond that the streams wait."""


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Each item with the number of its stream.

    The first error of a stream ends the whole with that error. Whichever way it ends, every stream is closed before
    this one is.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(BACKLOG)
    readers = [asyncio.create_task(_read(index, stream, arrived)) for index, stream in enumerate(streams)]
    try:
        num_open = len(readers)
        while num_open:
            entry = await arrived.get()
            if entry is None:
                num_open -= 1
            elif isinstance(entry, Exception):
                raise entry
            else:
                yield entry
    finally:
        await end_tasks(readers)


async def _read(
    index: int, stream: AsyncGenerator[T, None], arrived: asyncio.Queue[tuple[int, T] | Exception | None]
) -> None:
    """Carry one stream's items, then its end (None) or its error, to the reader of them all."""
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await arrived.put((index, item))
    except Exception as error:  # raised again, unchanged, by the reader of the queue
        await arrived.put(error)
    else:
        await arrived.put(None)
