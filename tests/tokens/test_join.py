"""What an engine tells routers of its coming and going."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from contracts.token_server import until
from fakes.serving import serving
from fourhop.service import ServerConfig
from fourhop.tokens.join import JoinConfig, Registration, registration
from fourhop.wire.errors import StartError

URL = "http://engine:8100"


@dataclass
class FakeRouter:
    """Notes what it is told. Refuses with `status` if that is not 200; answers nothing while `hangs`."""

    status: int = 200
    hangs: bool = False
    told: list[tuple[str, Any, str | None]] = field(default_factory=list)

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/router/{word}", self._take, methods=["POST"])])

    async def _take(self, request: Request) -> Response:
        self.told.append((request.path_params["word"], await request.json(), request.headers.get("authorization")))
        if self.hangs:
            await asyncio.Event().wait()
        error = {"error": {"message": "who are you?", "type": "AuthenticationError", "param": None, "code": 401}}
        return JSONResponse({} if self.status == 200 else error, status_code=self.status)

    @property
    def words(self) -> list[str]:
        return [word for word, _, _ in self.told]


class Beat:
    """Sleep that ends when the test says so."""

    def __init__(self) -> None:
        self.num_asleep = 0
        self._next: asyncio.Event | None = None

    async def sleep(self, seconds: float) -> None:
        assert seconds == 5.0
        self._next = self._next or asyncio.Event()
        self.num_asleep += 1
        try:
            await self._next.wait()
        finally:
            self.num_asleep -= 1

    def tick(self) -> None:
        assert self._next is not None
        self._next.set()
        self._next = None


@asynccontextmanager
async def joining(*routers: FakeRouter, key: str | None = None) -> AsyncIterator[tuple[Registration, Beat]]:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(router.app())) for router in routers]
        config = JoinConfig((",".join(urls),), "decode", join_key=key)
        beat = Beat()
        yield await stack.enter_async_context(registration(config, URL, beat.sleep)), beat


async def heard(router: FakeRouter, beat: Beat, number: int) -> None:
    await until(lambda: len(router.told) == number and beat.num_asleep == 1)


def test_it_joins_when_it_listens_says_so_again_and_leaves() -> None:
    async def scenario() -> None:
        routers = FakeRouter(), FakeRouter()
        async with joining(*routers, key="root") as (member, beat):
            await asyncio.sleep(0)
            assert routers[0].told == []
            member.start()
            await until(lambda: beat.num_asleep == 2)
            beat.tick()
            await until(lambda: all(len(router.told) == 2 for router in routers))
            await member.leave()
            for router in routers:
                assert router.words == ["join", "join", "leave"]
                body = {"url": URL, "role": "decode", "every_s": 5.0}
                assert router.told[0] == ("join", body, "Bearer root")
                assert router.told[2] == ("leave", {"url": URL}, "Bearer root")

    asyncio.run(scenario())


def test_a_router_that_is_not_there_or_refuses_is_told_once_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fourhop")

    async def scenario() -> None:
        router = FakeRouter(status=401)
        async with joining(router) as (member, beat):
            member.start()
            for number in range(1, 4):
                await heard(router, beat, number)
                router.status = 401 if number < 2 else 200
                beat.tick()
            await heard(router, beat, 4)
            router.status = 401
            await member.leave()

    asyncio.run(scenario())
    told = [record.getMessage().split(" http")[0] + record.getMessage()[-14:] for record in caplog.records]
    assert told == ["could not join: who are you?", "joined://engine:8100", "could not tell: who are you?"]


def test_a_router_that_hangs_holds_up_neither_another_nor_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        hangs, goes = FakeRouter(hangs=True), FakeRouter()
        async with joining(hangs, goes) as (member, _):
            member.start()
            await until(lambda: goes.words == ["join"] and hangs.words == ["join"])
            leaving = asyncio.create_task(member.leave())
            await until(lambda: goes.words == ["join", "leave"])
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)

    asyncio.run(scenario())


def test_where_routers_reach_it() -> None:
    join = JoinConfig(("http://r",), "decode")
    assert join.url_of(ServerConfig(host="10.0.0.1", port=0), 8100) == "http://10.0.0.1:8100"
    assert join.url_of(ServerConfig(host="::1"), 8100) == "http://[::1]:8100"
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(StartError, match="--advertise-url"):
            join.url_of(ServerConfig(host=host), 8100)
    named = JoinConfig(("http://r",), "decode", advertise_url="http://engine-1:80")
    assert named.url_of(ServerConfig(host="0.0.0.0"), 8100) == "http://engine-1:80"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"join": ("http://r",)}, "--join-as"),
        ({"join": ("http://r,here",), "join_as": "decode"}, "not the URL of a server: here"),
        ({"join": ("http://r",), "join_as": "decode", "advertise_url": "http://a:99999"}, "not the URL of a server"),
        ({"join_interval_s": 0.0}, "join_interval_s"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JoinConfig(**settings)


def test_the_key_is_not_printed() -> None:
    assert "hidden" not in repr(JoinConfig(join=("http://r",), join_as="decode", join_key="hidden"))
