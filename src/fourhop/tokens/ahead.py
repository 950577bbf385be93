"""`Ahead`: a stream that is under way before anybody reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Asks a stream for its first item at once, in a task; from then on it is the stream.

    An error of that first item reaches the reader, or nobody if there is none. Close it whatever happens.
    """

    def __init__(self, stream: AsyncGenerator[T, None]) -> None:
        self._stream = stream
        self._first: asyncio.Task[T] | None = asyncio.create_task(self._ask())

    async def _ask(self) -> T:
        return await anext(self._stream)

    @property
    def failure(self) -> BaseException | None:
        """What came in place of the first item, once it has."""
        first = self._first
        return None if first is None or not first.done() or first.cancelled() else first.exception()

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[T]:
        if self._first is None:
            return anext(self._stream)
        first, self._first = self._first, None
        return first

    async def aclose(self) -> None:
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
            self._first = None
        await self._stream.aclose()
