"""The contract of `TokenServer`, as checks that hold for an engine, a remote engine and a router alike.

A test module gives a way to open a `Subject` and runs every check against a fresh one:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_contract(check: Check) -> None:
        asyncio.run(run_check(check, open_subject))
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass

import msgspec

from fourhop.tokens.server import TokenServer
from fourhop.wire.errors import FourhopError
from fourhop.wire.generate import GenerateChunk, GenerateRequest, SamplingParams, Usage

SOON_S = 5.0
NUM_TOKENS = 12


@dataclass(frozen=True)
class Subject:
    """A server under test. `prompt` can be continued by at least 24 tokens; `is_idle` tells that nothing is left over:
    no request runs, no connection is open, no block is held."""

    server: TokenServer
    prompt: list[int]
    is_idle: Callable[[], bool]


Check = Callable[[Subject], Awaitable[None]]
Open = Callable[[], AbstractAsyncContextManager[Subject]]


async def run_check(check: Check, open_subject: Open) -> None:
    async with open_subject() as subject:
        await check(subject)
        await until(subject.is_idle)


async def until(condition: Callable[[], bool]) -> None:
    """Give the server's tasks their turns until the condition holds."""
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 (the condition belongs to the server under test)
            await asyncio.sleep(0.001)


def request(subject: Subject, **params: object) -> GenerateRequest:
    """A greedy request for `NUM_TOKENS` tokens that EOS does not end, changed by `params`."""
    defaults = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "seed": 7, "ignore_eos": True}
    return GenerateRequest(
        token_ids=subject.prompt,
        sampling_params=msgspec.convert(defaults | params, SamplingParams),
        request_id="contract",
    )


async def chunks_of(server: TokenServer, request: GenerateRequest) -> list[GenerateChunk]:
    async with aclosing(server.generate(request)) as chunks:
        return [chunk async for chunk in chunks]


def tokens_of(chunks: Sequence[GenerateChunk], index: int = 0) -> list[int]:
    return [
        token for chunk in chunks for choice in chunk.choices if choice.index == index for token in choice.token_ids
    ]


def finishes_of(chunks: Sequence[GenerateChunk], index: int = 0) -> list[str]:
    return [
        choice.finish_reason
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index and choice.finish_reason is not None
    ]


def usage_of(chunks: Sequence[GenerateChunk]) -> Usage:
    assert chunks[-1].usage is not None
    return chunks[-1].usage


async def ends_with_a_finish_then_the_usage(subject: Subject) -> None:
    chunks = await chunks_of(subject.server, request(subject))
    assert len(tokens_of(chunks)) == NUM_TOKENS
    assert finishes_of(chunks) == ["length"]
    assert all(chunk.choices for chunk in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    usage = usage_of(chunks)
    num_prompt = len(subject.prompt)
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, NUM_TOKENS)
    assert usage.total_tokens == num_prompt + NUM_TOKENS


async def echoes_the_request_id(subject: Subject) -> None:
    chunks = await chunks_of(subject.server, request(subject))
    assert {chunk.request_id for chunk in chunks} == {"contract"}


async def keeps_to_max_tokens(subject: Subject) -> None:
    whole = tokens_of(await chunks_of(subject.server, request(subject)))
    for max_tokens in (1, 2, 5):
        chunks = await chunks_of(subject.server, request(subject, max_tokens=max_tokens))
        assert tokens_of(chunks) == whole[:max_tokens]
        assert finishes_of(chunks) == ["length"]
        assert usage_of(chunks).completion_tokens == max_tokens


async def stops_at_a_stop_token_and_sends_it(subject: Subject) -> None:
    whole = tokens_of(await chunks_of(subject.server, request(subject)))
    stop = whole[4]
    chunks = await chunks_of(subject.server, request(subject, stop_token_ids=[stop]))
    assert tokens_of(chunks) == whole[: whole.index(stop) + 1]
    assert finishes_of(chunks) == ["stop"]
    assert [choice.stop_reason for chunk in chunks for choice in chunk.choices][-1] == stop


async def stops_at_once_when_the_first_token_stops(subject: Subject) -> None:
    first = tokens_of(await chunks_of(subject.server, request(subject)))[0]
    chunks = await chunks_of(subject.server, request(subject, stop_token_ids=[first]))
    assert tokens_of(chunks) == [first]
    assert finishes_of(chunks) == ["stop"]
    assert usage_of(chunks).completion_tokens == 1


async def continues_after_output_token_ids(subject: Subject) -> None:
    whole = tokens_of(await chunks_of(subject.server, request(subject, temperature=1.0)))
    for num_known in (1, 5, NUM_TOKENS - 1):
        resumed = msgspec.structs.replace(request(subject, temperature=1.0), output_token_ids=whole[:num_known])
        chunks = await chunks_of(subject.server, resumed)
        assert tokens_of(chunks) == whole[num_known:]
        assert usage_of(chunks).completion_tokens == NUM_TOKENS


async def gives_every_choice_its_own_end_and_one_usage(subject: Subject) -> None:
    """Cases 53 and 56, for engine, connection and router alike."""
    alone = await chunks_of(subject.server, request(subject, temperature=1.0))
    chunks = await chunks_of(subject.server, request(subject, temperature=1.0, n=3))
    assert tokens_of(chunks, 0) == tokens_of(alone)
    for index in range(3):
        assert len(tokens_of(chunks, index)) == NUM_TOKENS
        assert finishes_of(chunks, index) == ["length"]
    assert len({tuple(tokens_of(chunks, index)) for index in range(3)}) == 3
    assert sum(chunk.usage is not None for chunk in chunks) == 1
    assert usage_of(chunks).completion_tokens == 3 * NUM_TOKENS
    assert usage_of(chunks).prompt_tokens == len(subject.prompt)


async def tells_of_the_prompt_with_the_first_token(subject: Subject) -> None:
    plain = await chunks_of(subject.server, request(subject, temperature=1.0, n=2))
    chunks = await chunks_of(subject.server, request(subject, temperature=1.0, n=2, prompt_logprobs=1))
    told = chunks[0].prompt_logprobs
    assert told is not None and told[0] is None and chunks[0].choices[0].index == 0
    assert [next(iter(entry)) for entry in told[1:] if entry is not None] == subject.prompt[1:]
    assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])
    assert [tokens_of(chunks, index) for index in (0, 1)] == [tokens_of(plain, index) for index in (0, 1)]


async def repeats_itself_with_the_same_seed(subject: Subject) -> None:
    first, second = [await chunks_of(subject.server, request(subject, temperature=1.0)) for _ in range(2)]
    assert tokens_of(first) == tokens_of(second)


async def keeps_concurrent_requests_apart(subject: Subject) -> None:
    """Eight at once, all with one id, give what each gives alone."""
    requests = [request(subject, temperature=1.0, seed=seed) for seed in range(8)]
    alone = [tokens_of(await chunks_of(subject.server, one)) for one in requests]
    together = await asyncio.gather(*(chunks_of(subject.server, one) for one in requests))
    assert [tokens_of(chunks) for chunks in together] == alone


async def refuses_before_the_first_chunk(subject: Subject) -> None:
    good = request(subject)
    before = tokens_of(await chunks_of(subject.server, good))
    bad = {
        "token_ids": msgspec.structs.replace(good, token_ids=[]),
        "token_ids[0]": msgspec.structs.replace(good, token_ids=[-1, *subject.prompt]),
        "token_ids[1]": msgspec.structs.replace(good, token_ids=[subject.prompt[0], 10**9]),
        "sampling_params.n": request(subject, n=0),
        "sampling_params.max_tokens": request(subject, max_tokens=0),
        "sampling_params.stop_token_ids[0]": request(subject, stop_token_ids=[10**9]),
        "sampling_params.temperature": request(subject, temperature=-1.0),
        "sampling_params.prompt_logprobs": request(subject, prompt_logprobs=-1),
        "sampling_params.stop": request(subject, stop=["x"]),
        "features": msgspec.structs.replace(good, features={"mm_hashes": {}}),
    }
    for param, wrong in bad.items():
        async with aclosing(subject.server.generate(wrong)) as chunks:
            try:
                await anext(chunks)
            except FourhopError as error:
                assert (error.status, error.param) == (400, param)
            else:
                raise AssertionError(f"{param} was accepted")
        assert tokens_of(await chunks_of(subject.server, good)) == before


async def aborts_when_it_is_closed(subject: Subject) -> None:
    for num_read in (1, 2, 5):
        chunks = subject.server.generate(request(subject))
        for _ in range(num_read):
            await anext(chunks)
        await chunks.aclose()
        await until(subject.is_idle)
    assert len(tokens_of(await chunks_of(subject.server, request(subject)))) == NUM_TOKENS


async def aborts_when_its_reader_is_cancelled(subject: Subject) -> None:
    for num_turns in (0, 1, 3, 10, 30):
        reader = asyncio.create_task(chunks_of(subject.server, request(subject, n=2)))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await until(subject.is_idle)
    assert len(tokens_of(await chunks_of(subject.server, request(subject)))) == NUM_TOKENS


CHECKS: tuple[Check, ...] = (
    ends_with_a_finish_then_the_usage,
    echoes_the_request_id,
    keeps_to_max_tokens,
    stops_at_a_stop_token_and_sends_it,
    stops_at_once_when_the_first_token_stops,
    continues_after_output_token_ids,
    gives_every_choice_its_own_end_and_one_usage,
    tells_of_the_prompt_with_the_first_token,
    repeats_itself_with_the_same_seed,
    keeps_concurrent_requests_apart,
    refuses_before_the_first_chunk,
    aborts_when_it_is_closed,
    aborts_when_its_reader_is_cancelled,
)
