"""Cases 82 and 83 of the case list, between a router and its engines: what crosses a hop, and connections that end."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import msgspec
import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from contracts.token_server import chunks_of, tokens_of, until
from fakes.asgi import Exchange, post
from fakes.stub_engine import StubEngine, next_token
from faults.network import MACHINE, Network
from faults.virtual_loop import VirtualLoop, run_virtual
from faults.weather import CALM, Storm
from fourhop.router.app import Router
from fourhop.router.config import RouterConfig
from fourhop.router.routes import router_routes
from fourhop.service import ServerConfig, create_app, json_response
from fourhop.tokens.routes import token_routes
from fourhop.wire.generate import GenerateRequest, SamplingParams
from tokens.test_client import END, EVENTS, STREAM, Peer, answer, chunked

GENERATE = "/inference/v1/generate"
ASKED: dict[str, Any] = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2, "seed": 1}}
GOOD = b"".join([STREAM, *map(chunked, EVENTS), END])


@asynccontextmanager
async def router_before(answers: bytes, *, closes: bool = False) -> AsyncIterator[tuple[Peer, Starlette]]:
    """The app of a router whose only engine gives these bytes to every request for tokens."""

    async def script(number: int, writer: asyncio.StreamWriter) -> bool:
        path = engine.heads[-1].split()[1]
        told = msgspec.json.encode(StubEngine("e").info()) if path == "/worker" else b"{}"
        writer.write(answers if path == GENERATE else answer(b"200 OK", told))
        return path != GENERATE or not closes

    engine = Peer(script)
    listener = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    config = RouterConfig((url,), upstream_api_key="the engine's", first_chunk_timeout_s=5.0)
    router = Router(config, registry=CollectorRegistry())
    server = ServerConfig(api_key=("the-clients",))
    async with router.running():
        yield engine, create_app(routes=router_routes(router), config=server, registry=CollectorRegistry())
    await until(lambda: engine.num_open == 0)
    listener.close()
    await listener.wait_closed()


async def ask(app: Starlette, body: bytes, **headers: str) -> Exchange:
    return await post(GENERATE, body, authorization="Bearer the-clients", **headers).run(app)


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


def told(engine: Peer) -> tuple[dict[str, str], bytes]:
    """Headers and body of the last request for tokens."""
    place = max(at for at, head in enumerate(engine.heads) if GENERATE in head)
    lines = engine.heads[place].split("\r\n")[1:-2]
    names = [line.partition(": ")[0].lower() for line in lines]
    assert len(set(names)) == len(names)
    return dict(zip(names, (line.partition(": ")[2] for line in lines), strict=True)), engine.bodies[place]


OF_THE_CLIENT = {
    "x_custom": "1",
    "connection": "keep-alive, x-hop",
    "x_hop": "1",
    "keep_alive": "timeout=5",
    "transfer_encoding": "chunked",
    "host": "elsewhere:1",
    "accept_encoding": "gzip",
    "content_length": "7",
}


def test_case_82_an_engine_gets_headers_of_its_own_hop() -> None:
    """Framing is computed, credentials are the router's, and nothing of the client's hop goes on."""

    async def scenario() -> None:
        async with router_before(GOOD) as (engine, app):
            exchange = await ask(app, msgspec.json.encode(ASKED), x_request_id="abc", **OF_THE_CLIENT)
            assert exchange.status == 200, exchange.content
            headers, body = told(engine)
            assert headers.pop("host").startswith("127.0.0.1:")
            assert headers.pop("content-length") == str(len(body))
            assert headers.pop("x-request-id") == msgspec.json.decode(body)["request_id"]
            headers.pop("traceparent", None)
            assert headers == {
                "content-type": "application/json",
                "accept": "text/event-stream",
                "accept-encoding": "identity",
                "authorization": "Bearer the engine's",
            }
            assert exchange.answer_headers["x-request-id"] == "abc"
            assert not {"content-encoding", "transfer-encoding", "connection"} & exchange.answer_headers.keys()

    run(scenario())


@pytest.mark.parametrize("padding", [b"", b" " * 5000], ids=["made longer", "made shorter"])
def test_case_82_a_body_that_is_written_anew_has_its_own_length(padding: bytes) -> None:
    async def scenario() -> None:
        async with router_before(GOOD) as (engine, app):
            sent = msgspec.json.encode(ASKED) + padding
            exchange = await ask(app, sent)
            assert exchange.status == 200
            assert int(exchange.answer_headers["content-length"]) == len(exchange.content)
            _, body = told(engine)
            assert (len(body) < len(sent)) is bool(padding)
            assert msgspec.json.decode(body)["token_ids"] == [1, 2]

    run(scenario())


FORTY = b"x" * 40
OPENAI = b'{"error":{"message":"too long","type":"T","param":"token_ids","code":400}}'
ERRORS = {
    "a text": (answer(b"400 No", FORTY), "the upstream server answered with status 400"),
    "OpenAI's": (answer(b"400 No", OPENAI), "too long"),
    "without parts of it": (answer(b"400 No", b'{"error":{"message":"too long"}}'), "too long"),
    "another code": (answer(b"400 No", OPENAI.replace(b"400", b'"context_length_exceeded"')), "too long"),
    "flat": (answer(b"400 No", b'{"object":"error","message":"too long","type":"T","code":400}'), "too long"),
    "gzip": (answer(b"400 No", gzip.compress(OPENAI), b"Content-Encoding: gzip"), "answered with status 400"),
    "cut": (answer(b"400 No", OPENAI).replace(b"Content-Length: 7", b"Content-Length: 17"), "too long"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ERRORS)
def test_case_82_an_error_that_is_written_anew_is_whole(name: str, stream: bool) -> None:
    sent, message = ERRORS[name]

    async def scenario() -> None:
        async with router_before(sent, closes=name == "cut") as (_, app):
            exchange = await ask(app, msgspec.json.encode(ASKED | {"stream": stream}))
            assert exchange.status == 400, exchange.content
            assert exchange.answer_headers["content-type"] == "application/json"
            assert int(exchange.answer_headers["content-length"]) == len(exchange.content)
            error = msgspec.json.decode(exchange.content)["error"]
            assert message in error["message"] and error["code"] == 400 and error["type"]

    run(scenario())


def test_case_82_a_compressed_stream_that_was_not_asked_for_is_an_error_by_name() -> None:
    async def scenario() -> None:
        packed = gzip.compress(b"".join(EVENTS))
        head = STREAM.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
        async with router_before(head + chunked(packed) + END) as (_, app):
            exchange = await ask(app, msgspec.json.encode(ASKED | {"stream": True}))
            assert exchange.status == 502
            assert b"an encoding that was not asked for" in exchange.content

    run(scenario())


# 83


KEEP_ALIVE_S = 1
IDLES_S = [0.9992, 0.9994, 0.9996, 0.9998, *(1.0 + 0.02 * step for step in range(11))]
NUM_REPEATS = 50


def listening(engine: StubEngine) -> HttpToolsProtocol:
    """A new connection to an engine that closes it after KEEP_ALIVE_S without a request, as uvicorn does."""
    config = uvicorn.Config(
        app_of(engine),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    return HttpToolsProtocol(config, ServerState(), {})


def app_of(engine: StubEngine) -> Starlette:
    async def health(request: Request) -> Response:
        return json_response({})

    async def worker(request: Request) -> Response:
        return json_response(engine.info())

    routes = [*token_routes(engine, abort=engine.abort), Route("/health", health), Route("/worker", worker)]
    return create_app(routes=routes, config=ServerConfig(), registry=CollectorRegistry())


@pytest.mark.parametrize("idle_s", IDLES_S)
def test_case_83_no_request_fails_where_the_engine_closes_idle_connections(idle_s: float) -> None:
    """In virtual time: the second request leaves just before, while and after the engine closes the connection."""
    storm = Storm(Random(0), CALM)
    network = Network(storm)
    engine = StubEngine("e")

    async def scenario() -> None:
        MACHINE.set("engine")
        network.listen(("10.0.0.1", 8000), lambda: listening(engine))
        MACHINE.set("client")
        # Probes would keep the connection busy.
        config = RouterConfig(("http://10.0.0.1:8000",), probe_interval_s=1e6, kv_recompute_threshold=16)
        router = Router(config, registry=CollectorRegistry(), clock=asyncio.get_running_loop().time)
        async with router.running():
            for number in range(NUM_REPEATS):
                request = GenerateRequest(token_ids=[number], sampling_params=SamplingParams(max_tokens=1, seed=1))
                for _ in range(2):
                    assert tokens_of(await chunks_of(router, request)) == [next_token(request, [])]
                    await asyncio.sleep(idle_s)

    run_virtual(scenario(), VirtualLoop(1000.0, network))
    assert len(engine.requests) == 2 * NUM_REPEATS
