"""A stock vLLM as a TokenServer, asked at its token endpoint and at completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from contracts.token_server import (
    CHECKS,
    Check,
    Subject,
    chunks_of,
    continues_after_output_token_ids,
    finishes_of,
    refuses_before_the_first_chunk,
    run_check,
    tokens_of,
    usage_of,
)
from fakes.serving import serving
from fakes.stock_vllm import StockVLLM, error, output_of
from fourhop.tokens.completions import COMPLETIONS
from fourhop.tokens.connection import Timeouts, open_session
from fourhop.tokens.continued import Continued, appended, seed_after
from fourhop.tokens.dialect import GENERATE, Dialect
from fourhop.tokens.engine import RemoteEngine
from fourhop.tokens.server import TokenServer
from fourhop.tokens.upstream import Upstream
from fourhop.tokens.vllm import VLLMTokenServer
from fourhop.wire.errors import EnginesDisagree, FourhopError, PeerError, PeerRefused
from fourhop.wire.generate import GenerateRequest, SamplingParams

PROMPT = [10, 11, 12, 13, 14]
DIALECTS = {"generate": GENERATE, "completions": COMPLETIONS}
BY_ITS_OWN_RULES = (continues_after_output_token_ids, refuses_before_the_first_chunk)
"""Sampled tokens are not a function of seed and place, and what is wrong is told in vLLM's words."""


@asynccontextmanager
async def stock(dialect: Dialect) -> AsyncIterator[tuple[StockVLLM, TokenServer]]:
    engine = StockVLLM("e")
    app = engine.app() if dialect is GENERATE else engine.plain_app()
    async with serving(app) as url, open_session() as session:
        yield engine, Continued(VLLMTokenServer(url, session, dialect=dialect))


def ask(known: list[int] | None = None, **params: Any) -> GenerateRequest:
    settings = {"max_tokens": 8, "temperature": 0.0, "seed": 3} | params
    return GenerateRequest(
        token_ids=PROMPT,
        sampling_params=msgspec.convert(settings, SamplingParams),
        request_id="r",
        output_token_ids=known or [],
    )


@pytest.mark.parametrize("check", [one for one in CHECKS if one not in BY_ITS_OWN_RULES], ids=lambda one: one.__name__)
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS.keys())
def test_a_stock_vllm_keeps_the_contract(check: Check, dialect: Dialect) -> None:
    @asynccontextmanager
    async def open_subject() -> AsyncIterator[Subject]:
        async with stock(dialect) as (engine, server):
            yield Subject(server, PROMPT, engine.is_idle)

    asyncio.run(run_check(check, open_subject))


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS.keys())
def test_a_greedy_output_is_gone_on_with(dialect: Dialect) -> None:
    whole = output_of(PROMPT, 8)

    async def scenario() -> None:
        async with stock(dialect) as (engine, server):
            for num_known in (1, 5, 7):
                chunks = await chunks_of(server, ask(whole[:num_known], min_tokens=6))
                assert tokens_of(chunks) == whole[num_known:]
                assert finishes_of(chunks) == ["length"]
                assert (usage_of(chunks).prompt_tokens, usage_of(chunks).completion_tokens) == (5, 8)
                assert engine.bodies[-1]["token_ids"] == PROMPT + whole[:num_known]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5, "temperature": 0.9},
        {"structured_outputs": {"json_object": True}, "temperature": 0.9},
    ],
)
def test_an_output_that_decides_on_what_follows_is_made_again(params: dict[str, Any]) -> None:
    whole = output_of(PROMPT, 8, 3 if params.get("temperature") else None)

    async def scenario() -> None:
        async with stock(GENERATE) as (engine, server):
            for num_known in (1, 5, 7):
                chunks = await chunks_of(server, ask(whole[:num_known], logprobs=1, **params))
                assert tokens_of(chunks) == whole[num_known:]
                told = [choice.logprobs for chunk in chunks for choice in chunk.choices]
                assert [one.token_id for some in told if some for one in some.content] == whole[num_known:]
                assert usage_of(chunks).completion_tokens == 8
                assert engine.bodies[-1]["token_ids"] == PROMPT
            with pytest.raises(EnginesDisagree):
                await chunks_of(server, ask([whole[0], whole[1] ^ 1], **params))

    asyncio.run(scenario())


def test_sampling_goes_on_with_numbers_that_were_not_drawn_yet() -> None:
    asked = ask([1, 2], temperature=1.0)
    rest = appended(asked)
    assert (rest.token_ids, rest.output_token_ids, rest.sampling_params.max_tokens) == ([*PROMPT, 1, 2], [], 6)
    assert rest.sampling_params.seed == seed_after(3, 2) != 3
    assert len({seed_after(seed, place) for seed in range(20) for place in range(1, 20)}) == 20 * 19


def test_every_sampling_parameter_is_written_out_for_completions() -> None:
    async def scenario() -> None:
        async with stock(COMPLETIONS) as (engine, server):
            await chunks_of(server, ask(temperature=1.0))
            assert {"temperature", "top_p", "repetition_penalty"} <= engine.bodies[0]["sampling_params"].keys()

    asyncio.run(scenario())


def test_logprobs_of_completions_are_those_of_tokens() -> None:
    async def scenario() -> None:
        async with stock(COMPLETIONS) as (_, server):
            chunks = await chunks_of(server, ask(logprobs=1))
            told = [one for chunk in chunks for choice in chunk.choices for one in choice.logprobs.content]  # type: ignore[union-attr]
            assert [one.token_id for one in told] == tokens_of(chunks)
            assert told[0].logprob == -1.0
            assert (told[0].top_logprobs[0].token_id, told[0].top_logprobs[0].rank) == (1, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS.keys())
@pytest.mark.parametrize("holds", [False, True])
def test_a_refusal_keeps_its_status_and_its_words(dialect: Dialect, holds: bool) -> None:
    async def scenario() -> None:
        async with stock(dialect) as (engine, server):
            engine.refusals = [error(429, "too many", "TooManyRequests", {"Retry-After": "3"})]
            request = msgspec.structs.replace(ask(), kv_transfer_params={"do_remote_decode": True} if holds else None)
            with pytest.raises(PeerRefused) as failure:
                await chunks_of(server, request)
            assert (failure.value.status, failure.value.message, failure.value.retry_after_s) == (429, "too many", 3.0)

    asyncio.run(scenario())


def test_an_answer_without_token_ids_is_an_error() -> None:
    with pytest.raises(msgspec.DecodeError, match="token_ids"):
        COMPLETIONS.decode(b'{"choices": [{"index": 0, "text": "Hi", "finish_reason": null}]}')
    with pytest.raises(msgspec.DecodeError, match="not the id of a token"):
        COMPLETIONS.decode(
            b'{"choices": [{"token_ids": [1], "logprobs": {"tokens": ["Hi"], "token_logprobs": [-1.0]}}]}'
        )


@pytest.mark.parametrize("is_plain", [False, True])
def test_an_engine_is_asked_what_it_speaks(is_plain: bool) -> None:
    async def scenario() -> None:
        engine = StockVLLM("e")
        app = engine.plain_app() if is_plain else engine.app()
        async with serving(app) as url, open_session() as session:
            remote = RemoteEngine(url, session, timeouts=Timeouts(), probe_timeout_s=2.0)
            assert await remote.check() is None
            assert tokens_of(await chunks_of(remote, ask())) == output_of(PROMPT, 8)
            await remote.abort(["x"])
            assert engine.aborted == ([] if is_plain else ["generate-tokens-x"])
            engine.dead = "killed"
            with pytest.raises(PeerError):
                await remote.check()

    asyncio.run(scenario())


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_frontends_upstream_may_be_any_vllm(is_plain: bool) -> None:
    async def scenario() -> None:
        engine = StockVLLM("e")
        app = engine.plain_app() if is_plain else engine.app()
        async with serving(app) as url, open_session() as session:
            upstream = Upstream(url, session, timeouts=Timeouts())
            for _ in range(2):
                assert tokens_of(await chunks_of(upstream, ask())) == output_of(PROMPT, 8)
            engine.refusals = [error(404, "no such model", "NotFoundError")]
            with pytest.raises(PeerRefused, match="no such model"):
                await chunks_of(upstream, ask())

    asyncio.run(scenario())


def test_an_engine_that_cannot_say_what_it_speaks_is_ill() -> None:
    async def scenario() -> None:
        engine = StockVLLM("e")
        app = engine.app()
        app.router.routes = [route for route in app.router.routes if "abort" not in str(route)]

        async def broken(request: Any) -> Any:
            return error(500, "broken", "InternalServerError")

        app.add_route("/inference/v1/abort_requests", broken, methods=["POST"])
        async with serving(app) as url, open_session() as session:
            remote = RemoteEngine(url, session, timeouts=Timeouts(), probe_timeout_s=2.0)
            with pytest.raises(FourhopError, match="broken"):
                await remote.check()

    asyncio.run(scenario())
