"""Moving a stream while it runs, at any token: no token is lost, repeated or explained to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing

import msgspec
import pytest
from starlette.applications import Starlette

from contracts.token_server import finishes_of, tokens_of, usage_of
from fakes.asgi import Exchange
from fakes.fleet import Bench, bench
from fakes.stub_engine import next_token
from fourhop.router.ledger import HoldState
from fourhop.router.migration import MoveRequest
from fourhop.router.routes import router_routes
from fourhop.service import ServerConfig, create_app
from fourhop.wire.errors import ClientError, ErrorBody, NotFound, PeerRefused
from fourhop.wire.generate import GenerateRequest, SamplingParams

REQUEST = GenerateRequest(
    token_ids=[1, 2, 3, 4, 5], sampling_params=SamplingParams(max_tokens=12, seed=11), request_id="r"
)


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


def expected() -> list[int]:
    output: list[int] = []
    for _ in range(12):
        output.append(next_token(REQUEST, output))
    return output


@pytest.mark.parametrize("num_read", range(1, 12))
def test_a_stream_is_moved_at_any_token(num_read: int) -> None:
    async def scenario() -> None:
        async with bench(1, 2) as one:
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                received = [await anext(chunks) for _ in range(num_read)]
                await one.router.migration.drain("http://d0")
                await one.router.migration.go_on()
                received += [chunk async for chunk in chunks]
            assert tokens_of(received) == expected()
            assert finishes_of(received) == ["length"]
            assert usage_of(received).completion_tokens == 12
            assert all(chunk.kv_transfer_params is None for chunk in received)
            await one.settle()
            assert one.router.ledger.ended[HoldState.RELEASED] == 0

    run(scenario())


def test_what_reached_a_draining_engine_later_is_moved_too() -> None:
    async def scenario() -> None:
        async with bench(1, 2) as one:
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                received = [await anext(chunks)]
                drained = await one.router.migration.drain("http://d0")
                assert (drained.in_flight, drained.num_migrated) == (1, 0), "its leg is not read yet"
                received.append(await anext(chunks))
                await one.router.migration.go_on()
                received += [chunk async for chunk in chunks]
            assert tokens_of(received) == expected()
            assert one.decode[1].num_pulled == 1
            await one.settle()

    run(scenario())


def test_with_nowhere_to_go_a_stream_ends_where_it_is() -> None:
    async def scenario() -> None:
        async with bench(0, 1) as one:
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                received = [await anext(chunks)]
                assert (await one.router.migration.drain("http://d0")).num_migrated == 0
                received += [chunk async for chunk in chunks]
            assert tokens_of(received) == expected()
            await one.settle()

    run(scenario())


def test_an_engine_that_cannot_move_requests_finishes_them() -> None:
    async def scenario() -> None:
        async with bench(0, 2) as one:
            one.decode[0].migrate_error = PeerRefused(404, ErrorBody("?", "NotFoundError", None, 404))
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                received = [await anext(chunks)]
                assert (await one.router.migration.drain("http://d0")).num_migrated == 0
                received += [chunk async for chunk in chunks]
            assert tokens_of(received) == expected()
            assert one.decode[1].requests == []

    run(scenario())


def test_a_bad_ticket_of_a_moved_stream_costs_a_prefill_and_nothing_else() -> None:
    async def scenario() -> None:
        async with bench(1, 2) as one:
            one.decode[0].ticket_changes = {"token_hash": "0"}
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                received = [await anext(chunks) for _ in range(3)]
                await one.router.migration.drain("http://d0")
                received += [chunk async for chunk in chunks]
            assert tokens_of(received) == expected()
            assert one.decode[1].requests[0].kv_transfer_params is None
            assert one.count("fourhop_router_moved_total", **{"with": "no_ticket"}) == 1
            await one.settle()

    run(scenario())


def test_a_request_is_moved_to_the_engine_that_is_named() -> None:
    async def scenario() -> None:
        async with bench(1, 3) as one, aclosing(one.router.generate(REQUEST)) as chunks:
            received = [await anext(chunks) for _ in range(2)]
            answer = await one.router.migration.move(MoveRequest("r", "http://d2"))
            assert answer.num_migrated == 1
            received += [chunk async for chunk in chunks]
            assert tokens_of(received) == expected()
            assert [len(engine.requests) for engine in one.decode] == [1, 0, 1]

    run(scenario())


def test_what_cannot_be_moved_is_refused() -> None:
    async def scenario() -> None:
        async with bench(1, 2) as one:
            migration = one.router.migration
            with pytest.raises(NotFound, match="no request of this id"):
                await migration.move(MoveRequest("r"))
            with pytest.raises(NotFound, match="no engine"):
                await migration.drain("http://nowhere")
            await migration.drain("http://d1")
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                await anext(chunks)
                with pytest.raises(ClientError, match="draining") as refused:
                    await migration.move(MoveRequest("r", "http://d1"))
                assert refused.value.param == "to"
            await one.settle()

    run(scenario())


def app_of(one: Bench) -> Starlette:
    return create_app(routes=router_routes(one.router), config=ServerConfig(api_key=("secret",)), registry=one.registry)


async def post(app: Starlette, path: str, value: object, key: str | None = "secret") -> Exchange:
    headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    return await Exchange("POST", path, headers, [msgspec.json.encode(value)]).run(app)


def test_drain_and_undrain_over_http_need_the_key() -> None:
    async def scenario() -> None:
        async with bench(1, 2) as one:
            app, worker = app_of(one), one.router.fleet.workers["http://d0"]
            assert (await post(app, "/router/drain", {"worker": worker.name}, key=None)).status == 401
            drained = await post(app, "/router/drain", {"worker": worker.name})
            assert drained.json() == {"worker": worker.name, "draining": True, "in_flight": 0, "num_migrated": 0}
            assert worker.is_draining
            assert (await post(app, "/router/undrain", {"worker": worker.name})).status == 200
            assert not worker.is_draining
            assert (await post(app, "/router/drain", {"worker": "http://nowhere"})).status == 404
            assert (await post(app, "/router/drain", {"engine": worker.name})).status == 400
            assert (await post(app, "/inference/v1/migrate", {"request_id": "x"})).status == 404

    run(scenario())
