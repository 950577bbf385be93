"""The HTTP client's own promises: what is reused, what is not, and answers of every framing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

import pytest

from contracts.token_server import until
from fourhop.tokens.address import Origin, check_url, split_url
from fourhop.tokens.connection import Session, Timeouts, _exchange, call, open_session
from fourhop.tokens.http import HIGH_WATER_BYTES
from fourhop.wire.errors import PeerError, PeerTimeout

TIMEOUTS = Timeouts(1.0, 5.0, 5.0)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


class Peer:
    """Answers the requests of each connection with the next of `answers`; None closes the connection instead."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.num_connections = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.append(writer)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                answer = self.answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
                if answer.endswith(b"CLOSE"):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()
        self.writers.remove(writer)


@asynccontextmanager
async def playing(peer: Peer, pool_idle_s: float = 2.0) -> AsyncIterator[tuple[Session, str]]:
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with open_session(pool_idle_s=pool_idle_s) as session:
        yield session, f"http://127.0.0.1:{port}/x"
    await until(lambda: not peer.writers)
    server.close()
    await server.wait_closed()


async def get(session: Session, url: str) -> bytes:
    async with call(session, "GET", url, timeouts=TIMEOUTS) as answer:
        return await answer.read_all()


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK, b"hi"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n1\r\ni\r\n0\r\n\r\n", b"hi"),
        (b"HTTP/1.1 200 OK\r\n\r\nhi CLOSE", b"hi CLOSE"),
        (b"HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n" + OK, b"hi"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    ],
)
def test_answers_of_every_framing(answer: bytes, body: bytes) -> None:
    async def scenario() -> None:
        async with playing(Peer(answer)) as (session, url):
            assert await get(session, url) == body

    run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\nshort CLOSE",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_answers_that_are_cut_or_not_readable(answer: bytes) -> None:
    async def scenario() -> None:
        async with playing(Peer(answer)) as (session, url):
            with pytest.raises(PeerError):
                await get(session, url)

    run(scenario())


def test_a_connection_that_says_close_is_not_used_again() -> None:
    async def scenario() -> None:
        peer = Peer(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), OK)
        async with playing(peer) as (session, url):
            assert [await get(session, url) for _ in range(2)] == [b"hi", b"hi"]
        assert peer.num_connections == 2

    run(scenario())


def test_bytes_that_nobody_asked_for_end_a_connection() -> None:
    """Else they would be read as the answer to the next request."""

    async def scenario() -> None:
        peer = Peer(OK, OK.replace(b"hi", b"ho"))
        async with playing(peer) as (session, url):
            assert await get(session, url) == b"hi"
            peer.writers[0].write(OK.replace(b"hi", b"??"))
            await until(lambda: not peer.writers)
            assert await get(session, url) == b"ho"
        assert peer.num_connections == 2

    run(scenario())


def test_idle_connections_are_closed_without_being_asked() -> None:
    """Case 83: nothing stays in the pool longer than its time."""

    async def scenario() -> None:
        peer = Peer(OK)
        async with playing(peer, pool_idle_s=0.01) as (session, url):
            await get(session, url)
            assert len(peer.writers) == 1
            await until(lambda: not peer.writers)

    run(scenario())


def test_concurrent_calls_have_a_connection_each_and_leave_them_for_later() -> None:
    async def scenario() -> None:
        peer = Peer(*[OK] * 20)
        async with playing(peer) as (session, url):
            for _ in range(2):
                assert await asyncio.gather(*(get(session, url) for _ in range(10))) == [b"hi"] * 10
        assert peer.num_connections == 10

    run(scenario())


def test_a_large_answer_waits_for_its_reader() -> None:
    async def scenario() -> None:
        size = 32 << 20
        peer = Peer(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size), OK)
        async with playing(peer) as (session, url):
            async with call(session, "GET", url, timeouts=TIMEOUTS) as answer:
                for _ in range(50):
                    await asyncio.sleep(0)
                first = await answer.read()
                assert len(first) < size // 2
                assert len(first) + len(await answer.read_all()) == size
            assert await get(session, url) == b"hi"
        assert peer.num_connections == 1

    run(scenario())


def test_an_answer_that_was_left_unread_does_not_stop_the_next_one() -> None:
    async def scenario() -> None:
        size = HIGH_WATER_BYTES + 1
        peer = Peer(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size), OK)
        async with playing(peer) as (session, url):
            async with call(session, "GET", url, timeouts=TIMEOUTS) as answer:
                await until(lambda: answer.is_complete)
            assert await get(session, url) == b"hi"

    run(scenario())


def test_a_line_break_cannot_enter_a_header() -> None:
    async def scenario() -> None:
        async with playing(Peer(OK)) as (session, url):
            with pytest.raises(ValueError, match="line break"):
                async with call(session, "GET", url, timeouts=TIMEOUTS, headers={"X": "a\r\nB: c"}):
                    pass

    run(scenario())


BAD_URLS = [
    *("ftp://a", "a:1", "", "http://", "http://a:99999", "http://a:x", "http://a:0", "http://[::1", "http://a..b"),
    *("http://" + "a" * 64, "http://a/ b", "http://a\n", "http://\u00fc", "http://a/\x7f"),
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_only_http_urls(url: str) -> None:
    with pytest.raises(ValueError, match="not an http URL"):
        split_url(url)
    with pytest.raises(ValueError, match="not the URL of a server"):
        check_url(url)


def test_a_url_keeps_its_query_and_a_server_has_none() -> None:
    assert split_url("https://a/b?c=d%2Fe&f") == (Origin("a", 443, True), "/b?c=d%2Fe&f")
    assert split_url("http://[::1]:8000?c") == (Origin("::1", 8000, False), "/?c")
    check_url("http://a:1/b")
    for url in ("http://a?", "http://a/b?c", "http://a#b", "http://key@a"):
        with pytest.raises(ValueError, match="not the URL of a server"):
            check_url(url)


def test_a_name_that_no_resolver_takes_is_a_peer_that_cannot_be_reached() -> None:
    async def scenario() -> None:
        async with open_session() as session:
            with pytest.raises(UnicodeError):
                await session.connect(Origin("a..b", 1, False), 1.0)
            with pytest.raises(PeerError, match=r"cannot connect to .*: no address"):
                await _exchange(session, Origin("a..b", 1, False), b"", TIMEOUTS)

    run(scenario())


def test_a_peer_below_another_path_of_the_same_origin_is_not_given_up_with_it() -> None:
    """As behind a gateway: /a is given up, /ab and /b are not."""

    async def scenario() -> None:
        async with playing(Peer(b"", b"", b"", OK, OK)) as (session, url):
            root = url.removesuffix("/x")
            paths = ("/a/v1", "/ab/v1", "/b/v1")
            calls = [asyncio.create_task(get(session, root + path)) for path in paths]
            await until(lambda: len(session._open) == 3 and all(one.path for one in session._open))
            session.cut(f"{root}/a")
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            assert [call.done() for call in calls] == [True, False, False]
            session.cut(root)
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(end) for end in ends] == [PeerTimeout] * 3

    run(scenario())


def test_a_peer_that_is_given_up_ends_every_call_that_waits_for_it_and_no_other() -> None:
    """Before the head, inside the body, and not at another peer."""

    async def scenario() -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi"
        async with playing(Peer(b"", head, OK)) as (session, url), playing(Peer(b"", OK)) as (_, other):
            calls = [asyncio.create_task(get(session, url)) for _ in range(2)]
            spared = asyncio.create_task(get(session, other))
            async with asyncio.timeout(5):
                while len(session._open) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            session.cut(url)
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(end) for end in ends] == [PeerTimeout, PeerTimeout]
            assert not spared.done()
            assert await get(session, url) == b"hi"
            session.cut(other)
            await asyncio.gather(spared, return_exceptions=True)

    run(scenario())
