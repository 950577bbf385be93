from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourhop.tokens.merge import merge
from fourhop.wire.errors import PeerError

State = dict[str, int]


async def numbers(count: int, state: State, error: Exception | None = None) -> AsyncGenerator[int, None]:
    """0 to count - 1, then the error if there is one. `state` counts what is open."""
    state["open"] = state.get("open", 0) + 1
    try:
        for number in range(count):
            await asyncio.sleep(0)
            yield number
        if error is not None:
            raise error
    finally:
        state["open"] -= 1


@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_every_item_once_and_in_its_streams_order(counts: list[int]) -> None:
    async def run() -> list[tuple[int, int]]:
        return [item async for item in merge([numbers(count, {}) for count in counts])]

    items = asyncio.run(run())
    for index, count in enumerate(counts):
        assert [number for stream, number in items if stream == index] == list(range(count))


@pytest.mark.parametrize("num_streams", [1, 3])
def test_the_first_error_ends_all(num_streams: int) -> None:
    state: State = {}

    async def run() -> None:
        streams = [numbers(3, state, PeerError("gone")), *(numbers(1000, state) for _ in range(num_streams - 1))]
        async for _ in merge(streams):
            pass

    with pytest.raises(PeerError, match="gone"):
        asyncio.run(run())
    assert state["open"] == 0


@pytest.mark.parametrize("num_streams", [1, 3])
def test_closing_closes_all(num_streams: int) -> None:
    state: State = {}

    async def run() -> None:
        async with aclosing(merge([numbers(1000, state) for _ in range(num_streams)])) as merged:
            await anext(merged)
        assert state["open"] == 0

    asyncio.run(run())
