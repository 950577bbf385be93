"""`RemoteTokenServer` against peers that break: every failure has its own error, and no stream ends clean by accident.

The peer is a raw socket that plays prepared bytes, so that streams can be cut anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest

from contracts.token_server import chunks_of, tokens_of, until, usage_of
from fakes.kv_world import make_ticket
from fourhop.tokens.client import RemoteTokenServer
from fourhop.tokens.connection import Timeouts, open_session
from fourhop.tokens.worker import RemoteWorker
from fourhop.wire.errors import Forbidden, FourhopError, KeyRefused, PeerError, PeerRefused, PeerTimeout
from fourhop.wire.generate import GenerateChunk, GenerateRequest, SamplingParams
from fourhop.wire.logprobs import PromptLogprob
from fourhop.wire.worker import PrefixRequest

TICKET = make_ticket("t", [0], "1")

REQUEST = GenerateRequest(token_ids=[1, 2], sampling_params=SamplingParams(max_tokens=2, seed=1), request_id="mine")
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"

# As a stock vLLM 0.32 writes them: nulls, its own id, no moments, no transfer parameters.
CHOICE = (
    b'{"request_id":"generate-tokens-mine","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    b'"finish_reason":%s,"stop_reason":null,"token_ids":[%d],"routed_experts":null,"sampling_mask":null,'
    b'"weight_versions":null,"logprobs":null}]}'
)
USAGE = (
    b'{"request_id":"generate-tokens-mine","usage":{"prompt_tokens":2,"total_tokens":4,"completion_tokens":2},'
    b'"output_mode":"tokens","choices":[]}'
)


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


EVENTS = [event(CHOICE % (b"null", 7)), event(CHOICE % (b'"length"', 8)), event(USAGE), DONE]


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer(status: bytes, body: bytes = b"", *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), b"Content-Type: application/json", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@dataclass
class Peer:
    """A server that plays `script` once a request is whole. `bodies` and `heads` are what it was sent."""

    script: Callable[[int, asyncio.StreamWriter], Awaitable[bool]]
    heads: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = [line.split(":")[1] for line in head.lower().splitlines() if line.startswith("content-length")]
                self.heads.append(head)
                self.bodies.append(await reader.readexactly(int(length[0]) if length else 0))
                if not await self.script(len(self.bodies), writer):
                    return
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self.num_open -= 1
            writer.close()


def plays(*parts: bytes, close: bool = False) -> Callable[[int, asyncio.StreamWriter], Awaitable[bool]]:
    async def script(number: int, writer: asyncio.StreamWriter) -> bool:
        for part in parts:
            writer.write(part)
        return not close

    return script


SHORT = Timeouts(connect_s=1.0, first_byte_s=0.05, idle_s=0.05)


@asynccontextmanager
async def peer(
    script: Callable[[int, asyncio.StreamWriter], Awaitable[bool]], timeouts: Timeouts | None = None
) -> AsyncIterator[tuple[Peer, RemoteTokenServer]]:
    playing = Peer(script)
    server = await asyncio.start_server(playing.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with open_session() as session:
        yield playing, RemoteTokenServer(f"http://127.0.0.1:{port}/", session, timeouts=timeouts, api_key="key")
    await until(lambda: playing.num_open == 0)
    server.close()
    await server.wait_closed()


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


async def failure_of(server: RemoteTokenServer) -> tuple[list[int], FourhopError]:
    received: list[GenerateChunk] = []
    async with aclosing(server.generate(REQUEST)) as chunks:
        try:
            async for chunk in chunks:
                received.append(chunk)
        except FourhopError as error:
            return tokens_of(received), error
    raise AssertionError("the stream ended well")


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_a_stock_vllm_stream_is_read_however_it_is_cut(size: int) -> None:
    async def scenario() -> None:
        whole = b"".join(EVENTS)
        parts = [chunked(whole[at : at + size]) for at in range(0, len(whole), size)]
        async with peer(plays(STREAM, *parts, END)) as (playing, server):
            chunks = await chunks_of(server, REQUEST)
            assert tokens_of(chunks) == [7, 8]
            assert usage_of(chunks).completion_tokens == 2
            assert {chunk.request_id for chunk in chunks} == {"mine"}
            [head], [body] = playing.heads, [msgspec.json.decode(body) for body in playing.bodies]
            assert head.startswith("POST /inference/v1/generate HTTP/1.1\r\n")
            for line in ("X-Request-Id: mine", "Authorization: Bearer key", "Accept: text/event-stream"):
                assert line in head
            assert body["stream"] is True and body["stream_options"]["include_usage"] is True

    run(scenario())


@pytest.mark.parametrize("num_bytes", range(1, len(b"".join(EVENTS)), 5))
def test_a_stream_that_is_cut_anywhere_is_an_error(num_bytes: int) -> None:
    """Both ways to cut it: the connection breaks, and the answer ends as if it were whole."""

    async def scenario() -> None:
        cut = b"".join(EVENTS)[:num_bytes]
        if cut.endswith(b"[DONE]\n"):
            return
        for ending in (b"", END):
            async with peer(plays(STREAM, chunked(cut), ending, close=True)) as (_, server):
                _, error = await failure_of(server)
                assert (type(error), error.status) == (PeerError, 502)

    run(scenario())


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([EVENTS[0], DONE], "without a finish"),
        ([EVENTS[0], EVENTS[1], DONE], "without its usage"),
        ([EVENTS[2], DONE], "without a finish"),
        ([DONE], "without a finish"),
        ([event(b"{nonsense")], "not a chunk"),
        ([event(b'{"choices":[{"token_ids":["x"]}]}')], "not a chunk"),
        ([event(b'{"choices":[{"token_ids":[1],"finish_reason":"\xff"}]}')], "not a chunk"),
    ],
)
def test_an_incomplete_or_senseless_stream_is_an_error(events: list[bytes], message: str) -> None:
    async def scenario() -> None:
        async with peer(plays(STREAM, chunked(b"".join(events)), END)) as (_, server):
            _, error = await failure_of(server)
            assert message in error.message and error.status == 502

    run(scenario())


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b'{"error":{"message":"boom","type":"InternalServerError","param":null,"code":500}}', 500, "boom"),
        (b'{"error":{"message":"full","type":"X","param":"n","code":429}}', 429, "full"),
        (b'{"error":{"message":"odd","code":"weird"}}', 502, "odd"),
        (b'{"error":{}}', 502, "the upstream server failed"),
    ],
)
def test_an_error_inside_a_stream_keeps_its_status(data: bytes, status: int, message: str) -> None:
    async def scenario() -> None:
        async with peer(plays(STREAM, chunked(EVENTS[0] + event(data) + DONE), END)) as (_, server):
            tokens, error = await failure_of(server)
            assert (tokens, error.status, error.message) == ([7], status, message)
            assert isinstance(error, PeerError)

    run(scenario())


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_a_refusal_is_passed_on_with_its_status_and_hint(status: int) -> None:
    """Cases 80 and 82."""

    async def scenario() -> None:
        body = b'{"error":{"message":"no","type":"T","param":"token_ids","code":%d}}' % status
        async with peer(plays(answer(b"%d No" % status, body, b"Retry-After: 7"))) as (_, server):
            _, error = await failure_of(server)
            assert isinstance(error, PeerRefused)
            assert (error.status, error.type, error.message, error.param) == (status, "T", "no", "token_ids")
            assert error.retry_after_s == 7

    run(scenario())


@pytest.mark.parametrize(("status", "kind", "is_about_key"), [(401, "T", 1), (403, "T", 1), (403, Forbidden.type, 0)])
def test_a_key_that_the_peer_refuses_is_ours_and_no_clients(status: int, kind: str, is_about_key: int) -> None:
    async def scenario() -> None:
        body = b'{"error":{"message":"no","type":"%s","param":null,"code":%d}}' % (kind.encode(), status)
        async with peer(plays(answer(b"%d No" % status, body))) as (_, server):
            _, error = await failure_of(server)
            assert (error.status, isinstance(error, KeyRefused)) == (
                502 if is_about_key else status,
                bool(is_about_key),
            )
            assert ("--upstream-api-key" in error.message) == bool(is_about_key)

    run(scenario())


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (answer(b"500 No", b"<html>/secret/path</html>"), 500),
        (answer(b"503 No", b"", b"Retry-After: Wed, 21 Oct 2026 07:28:00 GMT"), 503),
        (answer(b"302 Found", b"", b"Location: http://127.0.0.1:1/"), 502),
        (answer(b"200 OK", b"{}"), 502),
        (b"nonsense\r\n\r\n", 502),
    ],
)
def test_an_answer_that_is_not_the_protocol_is_an_error_that_echoes_nothing(head: bytes, status: int) -> None:
    async def scenario() -> None:
        async with peer(plays(head, close=True)) as (_, server):
            _, error = await failure_of(server)
            assert error.status == status and error.retry_after_s is None
            assert "secret" not in error.message

    run(scenario())


def test_a_refused_connection_is_a_502() -> None:
    async def scenario() -> None:
        async with open_session() as session:
            _, error = await failure_of(RemoteTokenServer("http://127.0.0.1:9", session))
            assert (type(error), error.status) == (PeerError, 502)
            assert "http://127.0.0.1:9" in error.message

    run(scenario())


@pytest.mark.parametrize(
    "parts", [(), (STREAM,), (STREAM, chunked(EVENTS[0])), (answer(b"500 No", b"", b"X: y")[:-4],)]
)
def test_a_silent_peer_is_a_504(parts: tuple[bytes, ...]) -> None:
    async def scenario() -> None:
        async with peer(plays(*parts), SHORT) as (_, server):
            _, error = await failure_of(server)
            assert (type(error), error.status) == (PeerTimeout, 504)

    run(scenario())


def test_closing_the_iterator_closes_the_connection() -> None:
    async def scenario() -> None:
        async with peer(plays(STREAM, chunked(EVENTS[0]))) as (playing, server):
            chunks = server.generate(REQUEST)
            await anext(chunks)
            assert playing.num_open == 1
            await chunks.aclose()
            await until(lambda: playing.num_open == 0)

    run(scenario())


def test_a_whole_answer_leaves_its_connection_for_the_next_request() -> None:
    async def scenario() -> None:
        async with peer(plays(STREAM, chunked(b"".join(EVENTS)), END)) as (playing, server):
            for _ in range(5):
                await chunks_of(server, REQUEST)
            assert playing.num_connections == 1

    run(scenario())


@pytest.mark.parametrize("reset", [False, True])
def test_an_idle_connection_that_the_peer_closed_is_replaced_once(reset: bool) -> None:
    """Case 83: the peer closes when the second request arrives, before any byte of an answer."""

    async def scenario() -> None:
        async def script(number: int, writer: asyncio.StreamWriter) -> bool:
            if number == 2:
                if reset:
                    writer.transport.abort()
                return False
            for part in (STREAM, chunked(b"".join(EVENTS)), END):
                writer.write(part)
            return True

        async with peer(script) as (playing, server):
            for _ in range(2):
                assert tokens_of(await chunks_of(server, REQUEST)) == [7, 8]
            assert playing.num_connections == 2
            assert playing.bodies[1] == playing.bodies[2] != b""

    run(scenario())


def test_a_new_connection_that_breaks_is_not_tried_again() -> None:
    """Case 73: the request may have started."""

    async def scenario() -> None:
        async with peer(plays(close=True)) as (playing, server):
            _, error = await failure_of(server)
            assert error.status == 502
            assert playing.num_connections == 1

    run(scenario())


def test_a_worker_that_is_ill_says_why() -> None:
    async def scenario() -> None:
        ill = answer(b"503 No", b'{"status":"no step has ended for 61 s"}')
        async with peer(plays(ill)) as (_, server), open_session() as session:
            with pytest.raises(PeerError, match="no step has ended"):
                await RemoteWorker(server.url, session).check()

    run(scenario())


def test_a_stock_vllm_is_well_and_says_nothing_of_itself() -> None:
    async def scenario() -> None:
        async def script(number: int, writer: asyncio.StreamWriter) -> bool:
            writer.write(answer(b"200 OK") if number == 1 else answer(b"404 Not Found", b'{"detail":"Not Found"}'))
            return True

        async with peer(script) as (playing, server), open_session() as session:
            assert await RemoteWorker(server.url, session).check() is None
            assert [head.split()[1] for head in playing.heads] == ["/health", "/worker"]

    run(scenario())


def token(token_id: int, finish: bytes = b"null", index: int = 0, logprobs: bytes = b"null") -> bytes:
    return event(
        b'{"choices":[{"index":%d,"token_ids":[%d],"finish_reason":%s,"logprobs":%s}]}'
        % (index, token_id, finish, logprobs)
    )


def test_what_arrives_together_is_one_chunk() -> None:
    async def scenario() -> None:
        events = b"".join([token(7), token(8), token(9, b'"length"'), event(USAGE), DONE])
        async with peer(plays(STREAM, chunked(events), END)) as (_, server):
            chunks = await chunks_of(server, REQUEST)
            assert [[choice.token_ids for choice in chunk.choices] for chunk in chunks] == [[[7, 8, 9]], []]
            assert chunks[0].choices[0].finish_reason == "length"

    run(scenario())


def test_choices_tickets_and_logprobs_keep_their_places() -> None:
    async def scenario() -> None:
        one = b'{"content":[{"token_id":%d,"logprob":-1.0}]}'
        events = [
            event(b'{"choices":[],"kv_transfer_params":{"do_remote_prefill":true}}'),
            token(1, logprobs=one % 1),
            token(2, logprobs=one % 2),
            token(3),
            token(4, b'"length"'),
            event(b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":4,"total_tokens":5}}'),
            DONE,
        ]
        async with peer(plays(STREAM, chunked(b"".join(events)), END)) as (_, server):
            early, logged, plain, usage = await chunks_of(server, REQUEST)
            assert early.kv_transfer_params == {"do_remote_prefill": True} and early.choices == []
            assert logged.choices[0].logprobs is not None
            assert [entry.token_id for entry in logged.choices[0].logprobs.content] == [1, 2]
            assert plain.choices[0].token_ids == [3, 4]
            assert usage.usage is not None

    run(scenario())


def test_a_first_token_may_come_long_after_an_early_ticket() -> None:
    """Between tokens the peer has `idle_s`; up to the first one `first_byte_s`, whatever came before it."""

    async def scenario() -> None:
        async def script(number: int, writer: asyncio.StreamWriter) -> bool:
            writer.write(STREAM + chunked(event(b'{"choices":[],"kv_transfer_params":{"do_remote_prefill":true}}')))
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.write(b"".join(map(chunked, EVENTS)) + END)
            return True

        async with peer(script, Timeouts(1.0, first_byte_s=5.0, idle_s=0.05)) as (_, server):
            assert tokens_of(await chunks_of(server, REQUEST)) == [7, 8]

    run(scenario())


def test_choices_of_one_stream_are_not_joined() -> None:
    async def scenario() -> None:
        both = msgspec.structs.replace(REQUEST, sampling_params=SamplingParams(max_tokens=2, seed=1, n=2))
        events = [token(1), token(2, index=1), token(3, b'"stop"', index=1), token(4, b'"stop"'), event(USAGE), DONE]
        async with peer(plays(STREAM, chunked(b"".join(events)), END)) as (_, server):
            chunks = await chunks_of(server, both)
            assert (tokens_of(chunks), tokens_of(chunks, 1)) == ([1, 4], [2, 3])
            assert [choice.index for chunk in chunks for choice in chunk.choices] == [0, 1, 0]

    run(scenario())


def test_tokens_that_arrive_with_an_error_come_before_it() -> None:
    async def scenario() -> None:
        events = token(7) + token(8) + event(b'{"error":{"message":"out of memory","code":500}}') + DONE
        async with peer(plays(STREAM, chunked(events), END)) as (_, server):
            tokens, error = await failure_of(server)
            assert (tokens, error.status, error.message) == ([7, 8], 500, "out of memory")

    run(scenario())


def test_timeouts_are_bounded() -> None:
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="idle_s"):
            Timeouts(idle_s=wrong)


def test_an_engine_is_asked_for_leases_renewals_prefixes_and_migrations() -> None:
    answers = {
        "/kv/leases": b'{"engine_id":"e","epoch":"1","leases":[{"ticket_id":"t","request_id":"r","num_tokens":5,'
        b'"num_blocks":2,"expires_in_s":null}]}',
        "/kv/renew": msgspec.json.encode({"tickets": [TICKET]}),
        "/kv/prefix": b'{"kv_transfer_params":null}',
        "/inference/v1/migrate": b'{"num_migrated":2}',
    }
    playing: Peer

    async def script(number: int, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer(b"200 OK", answers[playing.heads[-1].split()[1]]))
        return True

    async def scenario() -> None:
        nonlocal playing
        async with peer(script) as (playing, server), open_session() as session:
            worker = RemoteWorker(server.url, session)
            assert [lease.ticket_id for lease in (await worker.leases()).leases] == ["t"]
            assert await worker.renew(["t", "u"]) == [TICKET]
            assert await worker.hold_prefix(PrefixRequest(token_ids=[1, 2], request_id="p")) is None
            assert await worker.migrate(["r", "s"]) == 2

    run(scenario())


ASKING = msgspec.structs.replace(REQUEST, sampling_params=SamplingParams(max_tokens=2, seed=1, prompt_logprobs=1))


def test_what_was_asked_of_the_prompt_comes_with_the_first_token() -> None:
    told = (
        b'"prompt_logprobs":[null,{"2":{"logprob":-1.5,"rank":3,"decoded_token":null},"9":{"logprob":-0.5,"rank":1}}]'
    )
    first = EVENTS[0].replace(b'"choices"', told + b',"choices"')

    async def scenario() -> None:
        async with peer(plays(STREAM, chunked(b"".join([first, *EVENTS[1:]])), END)) as (_, server):
            chunks = await chunks_of(server, ASKING)
            assert chunks[0].prompt_logprobs == [None, {2: PromptLogprob(-1.5, 3), 9: PromptLogprob(-0.5, 1)}]
            assert tokens_of(chunks) == [7, 8]

    run(scenario())


def test_a_stock_vllm_stream_without_it_is_a_refusal_of_the_field() -> None:
    async def scenario() -> None:
        async with peer(plays(STREAM, chunked(b"".join(EVENTS)), END)) as (_, server):
            with pytest.raises(PeerRefused) as refusal:
                await chunks_of(server, ASKING)
            assert (refusal.value.status, refusal.value.param) == (400, "sampling_params.prompt_logprobs")

    run(scenario())
