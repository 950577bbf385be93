"""Cases 79 to 85 of the case list at a router's own door: what a client sends, and what it then gets.

Where each input of a case is held:

    79  here, through frontend and router; `test_split` cancels in every turn of the loop; `tokens/test_routes`,
        `tokens/test_client` each hop alone; `faults/` clients that leave in storms
    80  here, through frontend, router and engine; `tokens/test_client`, `tokens/test_routes` each hop alone
    82  here and in `tokens/test_http` (framings, encodings), `service/test_app` (the echoed id)
    83  here, in virtual time; `tokens/test_client`, `tokens/test_http` on real sockets
    85  here; `test_fleet` (verdicts, backoff, thirty rounds of probes), `test_split` (counters after every end)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from contracts.token_server import chunks_of, tokens_of, until
from fakes.asgi import Exchange, post
from fakes.fleet import Bench, bench
from fakes.stub_engine import Fault, StubEngine, next_token
from fakes.toy import write_toy_checkpoint
from fourhop.checkpoint import Checkpoint
from fourhop.frontend import app as frontend
from fourhop.frontend.config import FrontendConfig
from fourhop.router.routes import router_routes
from fourhop.service import ServerConfig, create_app
from fourhop.wire.errors import ErrorBody, FourhopError, PeerError, PeerRefused, PeerTimeout
from fourhop.wire.generate import GenerateRequest, SamplingParams
from fourhop.wire.sse import SSEDecoder

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
ASKED = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 11}
TOKENS: dict[str, Any] = {"token_ids": [1, 2, 3, 4, 5], "sampling_params": {"max_tokens": 8, "seed": 11}}


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"))


def app_of(one: Bench) -> Starlette:
    return create_app(routes=router_routes(one.router), config=ServerConfig(), registry=CollectorRegistry())


def frontend_over(one: Bench, folder: Path) -> Starlette:
    return frontend.create(FrontendConfig(), Checkpoint("toy", folder), ServerConfig(), one.router)


async def ask(app: Starlette, path: str, body: dict[str, Any], **headers: str) -> Exchange:
    return await post(path, msgspec.json.encode(body), **headers).run(app)


# 79: the window, and what makes a request wait in it: prefill's fault, decode's fault, whether tickets come early.
WINDOWS: dict[str, tuple[Fault | None, Fault | None, bool]] = {
    "before anything": (Fault(-1, None), None, True),
    "mid-prefill, decode reserved": (Fault(0, None), None, True),
    "between prefill and decode": (None, Fault(-1, None), False),
    "decode has the KV and no token": (None, Fault(0, None), True),
    "mid-stream": (None, Fault(2, None), True),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
def test_case_79_a_client_that_leaves_fifty_times_leaves_nothing(folder: Path, window: str, stream: bool) -> None:
    of_prefill, of_decode, is_early = WINDOWS[window]

    async def scenario() -> None:
        async with bench() as one:
            app, [prefill], [decode] = frontend_over(one, folder), one.prefill, one.decode
            fresh = (await ask(app, CHAT, ASKED)).json()
            prefill.gives_early_tickets = is_early
            for _ in range(50):
                prefill.faults, decode.faults = [of_prefill], [of_decode]
                exchange = post(CHAT, msgspec.json.encode(ASKED | {"stream": stream}))
                serving = asyncio.create_task(exchange.run(app))
                await until(lambda: prefill.num_silent + decode.num_silent == 1)
                exchange.disconnect.set()
                await serving
                await one.settle()
            assert one.router.ledger.num_leaked == 0 and not one.router._records
            again = (await ask(app, CHAT, ASKED)).json()
            assert choices_of(again) == choices_of(fresh)

    run(scenario())


def choices_of(answer: Any) -> Any:
    return [(one["message"]["content"], one["finish_reason"]) for one in answer["choices"]]


def refused(status: int, message: str = "no", retry_after_s: float | None = None) -> PeerRefused:
    return PeerRefused(status, ErrorBody(message, "T", "token_ids", status), retry_after_s=retry_after_s)


def too_long() -> PeerRefused:
    return refused(400, "too long")


ANSWERS: dict[str, tuple[Callable[[], FourhopError], int, dict[str, str]]] = {
    "400": (too_long, 400, {}),
    "429": (lambda: refused(429, "queue is full", 7), 429, {"retry-after": "7"}),
    "503": (lambda: refused(503, "loading", 3), 503, {"retry-after": "3"}),
    "500": (lambda: refused(500, "out of memory"), 500, {}),
    "refused": (lambda: PeerError("cannot connect to http://p0: Connection refused"), 502, {}),
    "hang": (lambda: PeerTimeout("timed out waiting to hear from http://p0"), 504, {}),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("fleet", [(1, 0), (0, 1), (1, 1)], ids=["prefill", "decode", "both"])
def test_case_80_an_engines_refusal_is_the_status(
    folder: Path, fleet: tuple[int, int], name: str, stream: bool
) -> None:
    """Of every engine that there is: nothing was sent to the client before one of them had answered."""
    new_error, status, headers = ANSWERS[name]

    async def scenario() -> None:
        async with bench(*fleet) as one:
            doors = [(app_of(one), GENERATE, TOKENS)]
            if fleet == (1, 1):
                doors.append((frontend_over(one, folder), CHAT, ASKED))
            for app, path, body in doors:
                for engine in one.engines:
                    engine.faults = [Fault(-1, new_error()) for _ in range(3)]
                exchange = await ask(app, path, body | {"stream": stream})
                assert exchange.status == status, exchange.content
                assert {name: exchange.answer_headers.get(name) for name in headers} == headers
                check_error(exchange, new_error())
                await one.settle()
                one.clock.now_s += 60
                await one.look()

    run(scenario())


def check_error(exchange: Exchange, error: FourhopError) -> None:
    """A JSON body in OpenAI's shape, whole, with the peer's own words."""
    assert exchange.answer_headers["content-type"] == "application/json"
    assert int(exchange.answer_headers["content-length"]) == len(exchange.content)
    body = msgspec.json.decode(exchange.content)["error"]
    assert (body["message"], body["type"], body["code"]) == (error.message, error.type, error.status)


@pytest.mark.parametrize("stream", [True, False])
def test_case_80_what_decode_calls_wrong_before_the_first_token_is_the_status(stream: bool) -> None:
    """Decode is asked while the prompt is computed. Its word may come before there is anything to send."""

    async def scenario() -> None:
        async with bench() as one:
            one.prefill[0].gate = asyncio.Event()
            one.decode[0].faults = [Fault(-1, too_long())]
            asking = asyncio.create_task(ask(app_of(one), GENERATE, TOKENS | {"stream": stream}))
            await until(lambda: len(one.decode[0].requests) == 1 and one.decode[0].num_open == 0)
            one.prefill[0].gate.set()
            exchange = await asking
            assert exchange.status == 400, exchange.content
            check_error(exchange, too_long())
            await one.settle()

    run(scenario())


def test_case_80_what_decode_calls_wrong_later_ends_the_stream_with_an_error_event() -> None:
    async def scenario() -> None:
        async with bench() as one:
            one.prefill[0].gives_early_tickets = False
            one.decode[0].faults = [Fault(-1, too_long())]
            exchange = await ask(app_of(one), GENERATE, TOKENS | {"stream": True})
            first, error, done = SSEDecoder().feed(exchange.content)
            assert exchange.status == 200 and b"token_ids" in first and done == b"[DONE]"
            assert msgspec.json.decode(error)["error"]["code"] == 400
            await one.settle()

    run(scenario())


@pytest.mark.parametrize("name", ["429", "503", "500", "refused", "hang"])
def test_case_80_decode_that_cannot_is_replaced_and_the_answer_is_whole(name: str) -> None:
    async def scenario() -> None:
        async with bench() as one:
            one.decode[0].faults = [Fault(-1, ANSWERS[name][0]())]
            request = msgspec.convert(TOKENS, GenerateRequest)
            assert tokens_of(await chunks_of(one.router, request)) == alone(request)
            await one.settle()

    run(scenario())


def alone(request: GenerateRequest) -> list[int]:
    """What one engine alone would say."""
    output: list[int] = []
    for _ in range(request.sampling_params.max_tokens or 0):
        output.append(next_token(request, output))
    return output


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
def test_case_80_what_cannot_be_rendered_is_a_400_also_for_a_stream(folder: Path, path: str) -> None:
    async def scenario() -> None:
        async with bench() as one:
            exchange = await ask(frontend_over(one, folder), path, {"stream": True, "messages": [{"role": 7}]})
            assert exchange.status == 400
            assert exchange.answer_headers["content-type"] == "application/json"
            assert msgspec.json.decode(exchange.content)["error"]["message"]
            assert all(not engine.requests for engine in one.engines)

    run(scenario())


# 85


def request_of(seed: int = 1, max_tokens: int = 6) -> GenerateRequest:
    return GenerateRequest(token_ids=[1, 2, 3], sampling_params=SamplingParams(max_tokens=max_tokens, seed=seed))


@pytest.mark.parametrize(
    ("error", "status_then"),
    [
        (refused(400), None),
        (refused(429), None),
        (refused(503), None),
        (refused(500), 503),
        (PeerError("the connection broke"), 503),
        (PeerTimeout("silent"), 503),
    ],
    ids=["400", "429", "503", "500", "reset", "timeout"],
)
def test_case_85_ten_of_each(error: FourhopError, status_then: int | None) -> None:
    """4xx are the client's and 429 and 503 say "later": the engine stays. Others take it down until a probe."""

    async def scenario() -> None:
        async with bench(1, 0) as one:
            worker = one.router.fleet.workers["http://p0"]
            one.prefill[0].faults = [Fault(-1, error)] * 10
            statuses = [await status_of(one) for _ in range(10)]
            assert statuses == [error.status] + [status_then or error.status] * 9
            assert (worker.in_flight, worker.down is None) == (0, status_then is None)
            one.prefill[0].faults = []
            one.clock.now_s += 60
            await one.look()
            assert await status_of(one) == 200
            await one.settle()

    run(scenario())


async def status_of(one: Bench) -> int:
    try:
        await chunks_of(one.router, request_of())
    except FourhopError as error:
        return error.status
    return 200


def counts(one: Bench) -> list[tuple[int, int]]:
    """What the router counts at each engine, beside what is really there."""
    return [(one.router.fleet.workers[engine.name].in_flight, engine.num_open) for engine in one.engines]


def test_case_85_counters_are_true_at_all_times_through_a_hundred_mixed_requests() -> None:
    """Success, abort, retry and refusal in turn, each stopped in the middle, where what is counted is looked at."""

    async def scenario() -> None:
        async with bench(2, 2, max_retries=1) as one:
            for number in range(100):
                hurt: list[Callable[[StubEngine], None]] = [well, well, broken, busy]
                for engine in one.prefill:
                    hurt[number % 4](engine)
                for engine in one.engines:
                    engine.gate = asyncio.Event()
                reader = asyncio.create_task(chunks_of(one.router, request_of(number)))
                for _ in range(12):
                    await asyncio.sleep(0)
                assert all(counted == there for counted, there in counts(one)), (number, counts(one))
                if number % 4 == 1:
                    reader.cancel()
                for engine in one.engines:
                    assert engine.gate is not None
                    engine.gate.set()
                await asyncio.gather(reader, return_exceptions=True)
                await one.settle()
                one.clock.now_s += 60
                await one.look()
            assert counts(one) == [(0, 0)] * 4
            assert one.count("fourhop_router_owed_holds") == one.count("fourhop_router_leaked_holds") == 0

    run(scenario())


def well(engine: StubEngine) -> None:
    engine.faults = []


def broken(engine: StubEngine) -> None:
    engine.faults = [Fault(0, PeerError("the connection broke"))]


def busy(engine: StubEngine) -> None:
    engine.faults = [Fault(-1, refused(503))]
