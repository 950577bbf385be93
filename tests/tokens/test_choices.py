"""n choices: their seeds, and one stream out of many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.token_server import finishes_of, tokens_of, usage_of
from fakes.token_server import ScriptedTokenServer
from fourhop.tokens.choices import choice_seed, merge_choices, split_choices, with_seed
from fourhop.wire.errors import PeerError
from fourhop.wire.generate import GenerateChunk, GenerateRequest, SamplingParams


def request(**params: int | None) -> GenerateRequest:
    return GenerateRequest(token_ids=[1], sampling_params=SamplingParams(**params), request_id="r")  # type: ignore[arg-type]


@given(st.integers(-(2**63), 2**63 - 1))
def test_choice_0_has_the_requests_seed_and_no_two_are_equal(seed: int) -> None:
    seeds = [choice_seed(seed, index) for index in range(16)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 16
    assert all(0 <= other < 2**63 for other in seeds[1:])


def test_seeds_are_the_same_in_every_process() -> None:
    """Computed with `printf 42:1 | b2sum -l 64`, read as little-endian, halved."""
    assert [choice_seed(42, index) for index in range(3)] == [42, 1984979838283651376, 1180275854781279639]


@pytest.mark.parametrize("seed", [None, -1])
def test_a_missing_seed_is_drawn(seed: int | None) -> None:
    assert with_seed(request(seed=seed), lambda: 5).sampling_params.seed == 5
    assert with_seed(request(seed=0), lambda: 5).sampling_params.seed == 0


def test_a_request_of_one_choice_is_left_as_it_is() -> None:
    one = request(seed=3)
    assert split_choices(one) == [one]
    assert [part.sampling_params.n for part in split_choices(request(seed=3, n=3))] == [1, 1, 1]


def test_streams_are_merged_with_one_usage() -> None:
    async def scenario() -> None:
        servers = [ScriptedTokenServer([[index], [index, 9]], trailing_finish=index == 1) for index in range(3)]
        chunks = [chunk async for chunk in merge_choices([server.generate(request()) for server in servers])]
        for index in range(3):
            assert tokens_of(chunks, index) == [index, index, 9]
            assert finishes_of(chunks, index) == ["length"]
        assert [chunk.usage is not None for chunk in chunks].count(True) == 1
        assert (usage_of(chunks).prompt_tokens, usage_of(chunks).completion_tokens) == (1, 9)

    asyncio.run(scenario())


def test_the_first_error_ends_the_stream_and_closes_the_others() -> None:
    async def scenario() -> None:
        patient = ScriptedTokenServer([[1], [2]], stop_before=1)
        failing = ScriptedTokenServer([[1], [2]], stop_before=1, error=PeerError("died"))
        merged = merge_choices([patient.generate(request()), failing.generate(request())])
        received: list[GenerateChunk] = []
        with pytest.raises(PeerError, match="died"):
            async for chunk in merged:
                received.append(chunk)
        assert sorted(tokens_of(received, 0) + tokens_of(received, 1)) == [1, 1]
        assert (patient.num_open, patient.num_aborted, failing.num_open) == (0, 1, 0)

    asyncio.run(scenario())


def test_a_reader_that_leaves_closes_every_stream() -> None:
    async def scenario() -> None:
        servers = [ScriptedTokenServer([[1], [2]], stop_before=1) for _ in range(3)]
        async with aclosing(merge_choices([server.generate(request()) for server in servers])) as merged:
            await anext(merged)
        assert [server.num_open for server in servers] == [0, 0, 0]

    asyncio.run(scenario())


def test_a_slow_reader_holds_the_choices_back() -> None:
    async def scenario() -> None:
        sent = 0

        async def endless() -> AsyncGenerator[GenerateChunk, None]:
            nonlocal sent
            while True:
                sent += 1
                yield GenerateChunk(request_id="r", choices=[])
                await asyncio.sleep(0)

        async with aclosing(merge_choices([endless(), endless()])) as merged:
            await anext(merged)
            for _ in range(200):
                await asyncio.sleep(0)
        assert sent < 40

    asyncio.run(scenario())
