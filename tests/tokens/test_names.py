"""Names are looked up where a resolver that hangs holds up nothing."""

from __future__ import annotations

import asyncio
import socket
from threading import Event

import pytest

from fakes.serving import serving
from fakes.stock_vllm import StockVLLM
from fourhop.router.discovery.dns import DNSSource, Name
from fourhop.tokens.connection import Timeouts, call, open_session
from fourhop.tokens.names import Found, Names, hosts_of
from fourhop.wire.errors import PeerError, PeerTimeout

SOON = Timeouts(connect_s=0.01, first_byte_s=5.0, idle_s=5.0)


def entry(host: str) -> tuple[object, ...]:
    return (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 80))


def test_an_event_loop_ends_while_a_resolver_hangs() -> None:
    """Neither a call, nor a source of engines, nor the end of the loop waits for it, and it is asked once."""
    go_on, asked = Event(), list[str]()

    def hang(host: str, port: int, **options: object) -> Found:
        asked.append(host)
        go_on.wait()
        return [entry("127.0.0.1")]

    async def scenario() -> None:
        names = Names(hang)
        source = asyncio.create_task(DNSSource(Name("decode", "engine", 80), 5.0, names.look_up).look())
        async with open_session(look_up=names.look_up) as session:
            for _ in range(3):
                with pytest.raises(PeerTimeout, match="timed out waiting to connect to http://engine:80"):
                    async with call(session, "GET", "http://engine/health", timeouts=SOON):
                        raise AssertionError("there is no such engine")
        source.cancel()
        await asyncio.gather(source, return_exceptions=True)

    asyncio.run(scenario())
    assert asked == ["engine"]
    go_on.set()


def test_who_asks_again_gets_a_new_answer() -> None:
    answers: list[Found | OSError] = [[entry("127.0.0.1")], socket.gaierror(-2, "Name or service not known")]

    def ask(host: str, port: int, **options: object) -> Found:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def scenario() -> None:
        names = Names(ask)
        first, second = await asyncio.gather(names.look_up("a", 80), names.look_up("a", 80))
        assert first is second and first == [entry("127.0.0.1")]
        with pytest.raises(socket.gaierror):
            await names.look_up("a", 80)

    asyncio.run(scenario())


def test_an_address_is_not_looked_up() -> None:
    async def fail(host: str, port: int) -> Found:
        raise AssertionError("it was")

    assert asyncio.run(hosts_of("127.0.0.1", 80, fail)) == ["127.0.0.1"]
    assert asyncio.run(hosts_of("::1", 80, fail)) == ["::1"]


@pytest.mark.parametrize("found", [["127.0.0.2", "127.0.0.1"], ["127.0.0.1"], []])
def test_the_first_address_that_takes_a_connection_is_called(found: list[str]) -> None:
    async def look_up(host: str, port: int) -> Found:
        return [entry(one) for one in found]

    async def scenario() -> None:
        async with serving(StockVLLM("e").app()) as url, open_session(look_up=look_up) as session:
            named = url.replace("127.0.0.1", "engine")
            if not found:
                with pytest.raises(PeerError, match=r"cannot connect to http://engine:\d+: no address"):
                    async with call(session, "GET", named + "/health", timeouts=Timeouts()):
                        pass
                return
            async with call(session, "GET", named + "/health", timeouts=Timeouts()) as answer:
                assert answer.status == 200

    asyncio.run(scenario())
