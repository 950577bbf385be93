"""What a router remembers of a request is what happened to it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import msgspec
import pytest

from fakes.asgi import Exchange
from fakes.fleet import bench
from fakes.stub_engine import Fault
from fourhop.router.history import History
from fourhop.router.records import Ended, Life
from fourhop.router.routes import router_routes
from fourhop.service import ServerConfig, create_app
from fourhop.why import shown
from fourhop.wire.errors import FourhopError, NotFound, PeerError
from fourhop.wire.generate import GenerateRequest, SamplingParams
from fourhop.wire.moments import Moment
from fourhop.wire.why import Story

REQUEST = GenerateRequest(
    token_ids=[1, 2, 3], sampling_params=SamplingParams(max_tokens=4, seed=1), request_id="chatcmpl-mine"
)


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


def ended(request_id: str) -> Ended:
    return Ended(
        request_id=request_id,
        outcome="finished",
        status=None,
        error=None,
        num_prompt_tokens=3,
        num_output_tokens=4,
        num_retries=0,
        finish="stop",
        lives=[Life({Moment.RECEIVED.value: 7.0}, [])],
        ended_s=0.0021,
    )


def test_a_split_request_is_told_in_order() -> None:
    async def scenario() -> None:
        async with bench() as one:
            async for _ in one.router.generate(REQUEST):
                pass
            story = one.router.history.find("mine")
            told = [step.what for step in story.steps]
            wanted = [
                "received",
                "admitted",
                "placed: split",
                "http://p0 is asked for prefill",
                "http://d0 is asked for decode with the prefill engine's KV",
                "finished (length)",
            ]
            assert [what for what in told if what in wanted] == wanted
            assert told[-1] == "finished (length)"
            assert story.outcome == "finished" and (story.num_prompt_tokens, story.num_output_tokens) == (3, 4)
            at_s = [step.after_s for step in story.steps[:-1]]  # engines have a clock of their own here, which goes
            assert at_s == sorted(at_s)

    run(scenario())


def test_a_failure_and_what_came_of_it_are_told() -> None:
    async def scenario() -> None:
        async with bench(1, 2) as one:
            for engine in one.decode:
                engine.faults.append(Fault(after=1, error=PeerError("the cable was cut")))
            async for _ in one.router.generate(REQUEST):
                pass
            told = [step.what for step in one.router.history.find("chatcmpl-mine").steps]
            assert any(what.endswith("failed it: the cable was cut") for what in told)
            assert any("is asked for the rest, without KV" in what for what in told)

    run(scenario())


def test_a_request_that_was_refused_is_told_too() -> None:
    async def scenario() -> None:
        async with bench() as one:
            with pytest.raises(FourhopError):
                async for _ in one.router.generate(msgspec.structs.replace(REQUEST, token_ids=[-1])):
                    pass
            story = one.router.history.find("chatcmpl-mine")
            assert story.outcome == "refused" and story.status == 400 and story.error is not None
            assert story.error in story.steps[-1].what

    run(scenario())


def test_it_is_asked_for_over_http() -> None:
    async def scenario() -> None:
        async with bench() as one:
            async for _ in one.router.generate(REQUEST):
                pass
            app = create_app(
                routes=router_routes(one.router), config=ServerConfig(api_key=("k",)), registry=one.registry
            )
            answers = []
            for path, key in (("chatcmpl-mine", "k"), ("other", "k"), ("chatcmpl-mine", "wrong")):
                exchange = Exchange("GET", f"/router/requests/{path}", headers={"authorization": f"Bearer {key}"})
                await exchange.run(app)
                answers.append(exchange)
            assert [answer.status for answer in answers] == [200, 404, 401]
            assert msgspec.json.decode(answers[0].content, type=Story) == one.router.history.find("chatcmpl-mine")

    run(scenario())


def test_the_oldest_is_forgotten_and_of_two_with_one_id_the_later_is_kept() -> None:
    history = History(2)
    for name in ("a", "b", "a", "c"):
        history.keep(ended(name))
    assert history.find("a").request_id == "a"
    with pytest.raises(NotFound, match="no request b among the last 2"):
        history.find("b")
    with pytest.raises(NotFound):
        history.find("")
    nothing = History(0)
    nothing.keep(ended("a"))
    with pytest.raises(NotFound):
        nothing.find("a")


def test_a_story_is_shown_as_lines() -> None:
    assert shown(ended("a").story()).splitlines() == [
        "a: finished, 3 prompt and 4 output tokens",
        "       0.0 ms  received",
        "       2.1 ms  finished (stop)",
    ]
