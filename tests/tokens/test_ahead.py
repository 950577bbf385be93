"""A stream that is asked ahead is the same stream: every item, its error, and its close."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing

import pytest

from fourhop.tokens.ahead import Ahead


class Source:
    """Numbers up to `end`, then `error` if there is one."""

    def __init__(self, end: int, error: Exception | None = None) -> None:
        self.end = end
        self.error = error
        self.num_asked = 0
        self.is_open = False

    async def stream(self) -> AsyncGenerator[int, None]:
        self.is_open = True
        try:
            for number in range(self.end):
                self.num_asked += 1
                await asyncio.sleep(0)
                yield number
            if self.error is not None:
                raise self.error
            if self.end == 99:
                await asyncio.Event().wait()
        finally:
            self.is_open = False


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_the_first_item_is_asked_for_before_anybody_reads_and_no_other() -> None:
    async def scenario() -> None:
        source = Source(3)
        async with aclosing(Ahead(source.stream())) as ahead:
            await turns(5)
            assert source.num_asked == 1
            assert [number async for number in ahead] == [0, 1, 2]
        assert not source.is_open

    run(scenario())


@pytest.mark.parametrize("end", [0, 1])
def test_an_error_waits_for_the_reader(end: int) -> None:
    async def scenario() -> None:
        ahead = Ahead(Source(end, ValueError("late")).stream())
        await turns(5)
        with pytest.raises(ValueError, match="late"):
            async for _ in ahead:
                pass
        await ahead.aclose()

    run(scenario())


@pytest.mark.parametrize("num_turns", range(4))
@pytest.mark.parametrize("source", [Source(0), Source(3), Source(0, ValueError("nobody hears"))])
def test_closing_without_reading_closes_the_stream(source: Source, num_turns: int) -> None:
    async def scenario() -> None:
        ahead = Ahead(source.stream())
        await turns(num_turns)
        await ahead.aclose()
        await ahead.aclose()
        assert not source.is_open

    run(scenario())


def test_a_reader_that_is_cancelled_cancels_the_stream() -> None:
    async def scenario() -> None:
        source = Source(99)

        async def read() -> None:
            async with aclosing(Ahead(source.stream())) as ahead:
                async for _ in ahead:
                    pass

        reader = asyncio.create_task(read())
        await turns(2)
        assert source.is_open
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        assert not source.is_open

    run(scenario())
