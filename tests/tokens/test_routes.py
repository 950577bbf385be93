"""`/inference/v1/generate` and `/inference/v1/abort_requests` over any TokenServer, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from contracts.token_server import until
from fakes.asgi import Exchange, post
from fakes.stub_engine import StubEngine, next_token
from fakes.token_server import ScriptedTokenServer
from fourhop.service import ServerConfig, create_app
from fourhop.tokens.routes import token_routes
from fourhop.tokens.server import TokenServer
from fourhop.wire.errors import ErrorBody, PeerError, PeerRefused, Unavailable
from fourhop.wire.generate import GenerateRequest, GenerateResponse, SamplingParams
from fourhop.wire.sse import SSEDecoder

PATH = "/inference/v1/generate"
BODY: dict[str, Any] = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "seed": 1}}


def app_of(server: TokenServer, aborted: list[str] | None = None) -> Starlette:
    async def abort(ids: list[str]) -> None:
        (aborted if aborted is not None else []).extend(ids)

    routes = token_routes(server, abort=abort, models=["toy", "alias"])
    return create_app(routes=routes, config=ServerConfig(), registry=CollectorRegistry())


async def call(server: TokenServer, body: dict[str, Any], **headers: str) -> Exchange:
    return await post(PATH, msgspec.json.encode(body), **headers).run(app_of(server))


def events_of(exchange: Exchange) -> list[Any]:
    """The stream's events; the last one must be `[DONE]` and is left out."""
    *events, done = SSEDecoder().feed(exchange.content)
    assert done == b"[DONE]"
    return [msgspec.json.decode(event) for event in events]


def error_of(exchange: Exchange) -> dict[str, Any]:
    body = exchange.json()
    assert isinstance(body, dict)
    error: dict[str, Any] = body["error"]
    return error


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


def test_what_is_not_streamed_is_the_stream_collected() -> None:
    async def scenario() -> None:
        whole = await call(StubEngine("e"), BODY)
        answer = msgspec.json.decode(whole.content, type=GenerateResponse)
        streamed = events_of(await call(StubEngine("e"), BODY | {"stream": True}))
        tokens = [token for event in streamed for choice in event["choices"] for token in choice["token_ids"]]
        assert answer.choices[0].token_ids == tokens and len(tokens) == 4
        assert answer.choices[0].finish_reason == streamed[-1]["choices"][0]["finish_reason"] == "length"
        assert answer.usage is not None and answer.usage.total_tokens == 7
        assert answer.model == "toy" and answer.created > 0 and answer.prompt_token_ids is None
        request = GenerateRequest(token_ids=[1, 2, 3], sampling_params=SamplingParams(seed=1))
        assert tokens[:2] == [next_token(request, []), next_token(request, tokens[:1])]

    run(scenario())


@pytest.mark.parametrize(
    ("options", "num_usage_events", "has_running"),
    [
        (None, 0, False),
        ({}, 0, False),
        ({"include_usage": False}, 0, False),
        ({"include_usage": True}, 1, False),
        ({"include_usage": True, "continuous_usage_stats": True}, 1, True),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_usage_is_streamed_only_when_it_is_asked_for(
    options: dict[str, bool] | None, num_usage_events: int, has_running: bool, n: int
) -> None:
    """Case 53."""

    async def scenario() -> None:
        params = BODY["sampling_params"] | {"n": n}
        body = BODY | {"stream": True, "stream_options": options, "sampling_params": params}
        events = events_of(await call(StubEngine("e"), body))
        assert [event["choices"] for event in events].count([]) == num_usage_events
        if num_usage_events:
            assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 4 * n
        running = [event["usage"] for event in events if event["choices"]]
        assert all((usage is not None) == has_running for usage in running)
        if has_running:
            assert [usage["completion_tokens"] for usage in running] == list(range(1, 4 * n + 1))

    run(scenario())


def test_prompt_ids_are_returned_once_when_asked_for() -> None:
    async def scenario() -> None:
        body = BODY | {"return_token_ids": True}
        events = events_of(await call(StubEngine("e"), body | {"stream": True}))
        assert [event["prompt_token_ids"] for event in events] == [[1, 2, 3], None, None, None]
        whole = msgspec.json.decode((await call(StubEngine("e"), body)).content, type=GenerateResponse)
        assert whole.prompt_token_ids == [1, 2, 3]

    run(scenario())


@pytest.mark.parametrize(
    ("header", "body_id", "used"),
    [
        ({}, "chatcmpl-7", "chatcmpl-7"),
        ({"X_Request_Id": "h1"}, "chatcmpl-7", "h1"),
        ({}, "a\nb c", "abc"),
        ({}, "x" * 1_000_000, "x" * 128),
    ],
)
def test_ids_are_prefixed_and_safe_to_echo(header: dict[str, str], body_id: str, used: str) -> None:
    """Case 71."""

    async def scenario() -> None:
        engine = StubEngine("e")
        exchange = await call(engine, BODY | {"request_id": body_id, "stream": True}, **header)
        assert {event["request_id"] for event in events_of(exchange)} == {f"generate-tokens-{used}"}
        assert engine.requests[0].request_id == used

    run(scenario())


def test_a_request_without_an_id_gets_a_fresh_one() -> None:
    async def scenario() -> None:
        engine = StubEngine("e")
        await asyncio.gather(*(call(engine, BODY) for _ in range(2)))
        first, second = [request.request_id for request in engine.requests]
        assert first != second and len(first) == 32

    run(scenario())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"output_mode": "text"}, "output_mode"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"content_parts": [{"type": "image_url"}]}, "content_parts"),
        ({"ec_transfer_params": {"x": 1}}, "ec_transfer_params"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"priority": 3}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"sampling_params": {"stop": ["x"]}}, "sampling_params.stop"),
        ({"sampling_params": {"bad_words": ["x"]}}, "sampling_params.bad_words"),
        ({"sampling_params": {"prompt_logprobs": "all"}}, "sampling_params.prompt_logprobs"),
        ({"sampling_params": {"structured_outputs": {"tag": ""}}}, "sampling_params.structured_outputs"),
        ({"sampling_params": {"extra_args": {"x": 1}}}, "sampling_params.extra_args.x"),
        (
            {"sampling_params": {"extra_args": {"kv_transfer_params": 1}}},
            "sampling_params.extra_args.kv_transfer_params",
        ),
        ({"sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"sampling_params": None}, "sampling_params"),
        ({"token_ids": [True]}, "token_ids[0]"),
        ({"token_ids": [1, 1.5]}, "token_ids[1]"),
        ({"token_ids": [[-1]]}, "token_ids[0]"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_refused_by_path(change: dict[str, Any], param: str, stream: bool) -> None:
    async def scenario() -> None:
        engine = StubEngine("e")
        exchange = await call(engine, BODY | {"stream": stream and "stream_options" not in change} | change)
        assert exchange.status == 400
        assert error_of(exchange)["param"].replace("[...]", "[0]") in (param, param.replace("[1]", "[0]"))
        assert engine.requests == []
        assert (await call(engine, BODY)).status == 200

    run(scenario())


def test_an_unknown_model_is_not_found() -> None:
    async def scenario() -> None:
        exchange = await call(StubEngine("e"), BODY | {"model": "other"})
        assert (exchange.status, error_of(exchange)["param"]) == (404, "model")
        for name in (None, "", "toy", "alias"):
            assert (await call(StubEngine("e"), BODY | {"model": name})).status == 200

    run(scenario())


def test_transfer_parameters_may_come_in_extra_args_and_the_ticket_goes_back() -> None:
    async def scenario() -> None:
        engine = StubEngine("e")
        hold = {"kv_transfer_params": {"do_remote_decode": True}}
        for body in (BODY | hold, BODY | {"sampling_params": {"seed": 1, "extra_args": hold}}):
            answer = msgspec.json.decode((await call(engine, body)).content, type=GenerateResponse)
            assert answer.kv_transfer_params is not None and answer.kv_transfer_params["do_remote_prefill"] is True
            assert len(answer.choices[0].token_ids) == 1
        assert len(engine.holds) == 2

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_chunk_is_an_ordinary_answer(stream: bool) -> None:
    """Case 80."""

    async def scenario() -> None:
        for error in (
            Unavailable("nothing alive", retry_after_s=2),
            PeerRefused(429, ErrorBody("full", "X", None, 429), retry_after_s=2),
        ):
            server = ScriptedTokenServer([[1]], stop_before=0, error=error)
            exchange = await call(server, BODY | {"stream": stream})
            assert exchange.status == error.status
            assert exchange.answer_headers["retry-after"] == "2"
            assert error_of(exchange)["message"] == error.message
            assert server.num_open == 0

    run(scenario())


def test_an_error_after_the_first_chunk_ends_the_stream_with_an_error_event() -> None:
    async def scenario() -> None:
        server = ScriptedTokenServer([[1], [2]], stop_before=1, error=PeerError("the engine died"))
        exchange = await call(server, BODY | {"stream": True})
        *chunks, error = events_of(exchange)
        assert exchange.status == 200 and len(chunks) == 1
        assert error["error"] == {
            "message": "the engine died",
            "type": "BadGatewayError",
            "param": None,
            "code": 502,
        }
        whole = await call(ScriptedTokenServer([[1], [2]], stop_before=1, error=PeerError("the engine died")), BODY)
        assert whole.status == 502

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop_before", [0, 1])
def test_a_client_that_leaves_aborts_the_request(stream: bool, stop_before: int) -> None:
    """Case 79: before and after the headers, streamed and not."""

    async def scenario() -> None:
        server = ScriptedTokenServer([[1], [2]], stop_before=stop_before)
        exchange = post(PATH, msgspec.json.encode(BODY | {"stream": stream}))
        serving = asyncio.create_task(exchange.run(app_of(server)))
        await until(lambda: server.num_open == 1)
        exchange.disconnect.set()
        await serving
        assert (server.num_open, server.num_aborted) == (0, 1)

    run(scenario())


def test_server_timing_tells_what_had_happened_at_the_first_chunk() -> None:
    async def scenario() -> None:
        server = ScriptedTokenServer([[1], [2]], moments={"received": 0.0, "prefill_done": 0.0125})
        exchange = await call(server, BODY | {"stream": True})
        assert exchange.answer_headers["server-timing"] == "received;dur=0.0, prefill_done;dur=12.5"

    run(scenario())


def test_abort_takes_ids_with_and_without_the_prefix() -> None:
    async def scenario() -> None:
        aborted: list[str] = []
        body = msgspec.json.encode({"request_ids": ["generate-tokens-a", "b"]})
        exchange = await post("/inference/v1/abort_requests", body).run(app_of(StubEngine("e"), aborted))
        assert (exchange.status, exchange.content, aborted) == (200, b"", ["a", "b"])
        refused = await post("/inference/v1/abort_requests", b"{}").run(app_of(StubEngine("e"), aborted))
        assert refused.status == 400

    run(scenario())
