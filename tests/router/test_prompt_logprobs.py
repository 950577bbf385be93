"""Log-probabilities of the prompt over two engines: the one that computes it gives them, once, whatever happens."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec
import pytest

from contracts.token_server import chunks_of, tokens_of
from fakes.fleet import Bench, bench
from fakes.stub_engine import Fault, stub_prompt_logprobs
from fourhop.wire.errors import PeerError
from fourhop.wire.generate import GenerateChunk, GenerateRequest, SamplingParams

PARAMS = SamplingParams(max_tokens=8, seed=11, prompt_logprobs=2)
REQUEST = GenerateRequest(token_ids=[1, 2, 3, 4, 5], sampling_params=PARAMS, request_id="r")
PLAIN = msgspec.structs.replace(REQUEST, sampling_params=msgspec.structs.replace(PARAMS, prompt_logprobs=None))


def asked(one: Bench) -> list[tuple[str, int | None]]:
    """What each leg was asked to tell of the prompt."""
    return [
        (engine.name, request.sampling_params.prompt_logprobs) for engine in one.engines for request in engine.requests
    ]


async def check(one: Bench, chunks: list[GenerateChunk]) -> None:
    assert [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs] == [
        stub_prompt_logprobs([1, 2, 3, 4, 5])
    ]
    assert chunks[0].prompt_logprobs is not None
    assert tokens_of(chunks) == tokens_of(await chunks_of(one.router, PLAIN))
    await one.settle()


def test_the_prefill_leg_gives_them() -> None:
    async def main() -> None:
        async with bench() as one:
            chunks = await chunks_of(one.router, REQUEST)
            assert asked(one) == [("http://p0", 2), ("http://d0", None)]
            await check(one, chunks)

    asyncio.run(main())


@pytest.mark.parametrize("after", [-1, 0, 1])
def test_a_prefill_engine_that_fails_makes_the_next_one_tell_if_nobody_did(after: int) -> None:
    async def main() -> None:
        async with bench(2, 1) as one:
            for engine in one.prefill:
                engine.faults = [Fault(after, PeerError("the connection broke"))]
            one.prefill[1].faults.clear()
            chunks = await chunks_of(one.router, REQUEST)
            owed = [count for name, count in asked(one) if name == "http://p1"]
            assert owed == ([] if after == 1 else [2])
            await check(one, chunks)

    asyncio.run(main())


def test_who_goes_on_after_the_first_token_is_not_asked_again() -> None:
    async def main() -> None:
        async with bench(0, 2) as one:
            async with aclosing(one.router.generate(REQUEST)) as stream:
                chunks = [await anext(stream)]
                await one.router.migration.drain("http://d0")
                await one.router.migration.go_on()
                chunks += [chunk async for chunk in stream]
            assert asked(one) == [("http://d0", 2), ("http://d1", None)]
            await check(one, chunks)

    asyncio.run(main())
