"""Engines that answer at once, and clients, for `router.py`: HTTP by hand, so that they cost next to nothing.

An engine's answers are prepared; which one a request gets is told by its path and by the length of its body.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import cast

import msgspec
import uvloop

from fourhop.tokens.dialect import GENERATE_PATH
from fourhop.wire.generate import ChunkChoice, GenerateChunk, GenerateRequest, SamplingParams, StreamOptions, Usage
from fourhop.wire.sse import DONE_EVENT, encode_event
from fourhop.wire.ticket import FirstToken, KVTicket, hash_tokens
from fourhop.wire.worker import Leases, WorkerInfo

END = b"0\r\n\r\n"
TOKENS = re.compile(rb'"token_ids":\[([0-9,]+)\]')
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Shape:
    """Requests of one kind. Tokens come every `step_s` seconds from a decode engine; 0: all at once."""

    num_prompt: int
    num_output: int
    step_s: float = 0.0

    @cached_property
    def prompt(self) -> list[int]:
        return [1000 + number % 40_000 for number in range(self.num_prompt)]

    @cached_property
    def request(self) -> bytes:
        body = msgspec.json.encode(
            GenerateRequest(
                token_ids=self.prompt,
                sampling_params=SamplingParams(max_tokens=self.num_output, seed=1),
                stream=True,
                stream_options=StreamOptions(include_usage=True),
            )
        )
        head = f"POST {GENERATE_PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


# What engines say.


def http(body: bytes) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def stream(shape: Shape, tokens: Sequence[int], ticket: KVTicket | None, moments: dict[str, float]) -> list[bytes]:
    """A streamed answer in pieces: an early ticket if there is one, an event for each token, and the end."""
    early = [] if ticket is None else [msgspec.structs.replace(ticket, block_ids=[])]
    chunks = [
        GenerateChunk(request_id="mock", choices=[], kv_transfer_params=msgspec.to_builtins(first)) for first in early
    ]
    chunks += [
        GenerateChunk(
            request_id="mock",
            choices=[ChunkChoice(token_ids=[token], finish_reason="length" if last else None)],
            kv_transfer_params=msgspec.to_builtins(ticket) if last and ticket else None,
            moments=moments if last or number == 0 else None,
        )
        for number, token in enumerate(tokens)
        for last in [number == len(tokens) - 1]
    ]
    usage = Usage(shape.num_prompt, len(tokens), shape.num_prompt + len(tokens))
    chunks.append(GenerateChunk(request_id="mock", choices=[], usage=usage))
    events = [*(encode_event(msgspec.json.encode(chunk)) for chunk in chunks), DONE_EVENT]
    pieces = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
    return [HEAD + pieces[0], *pieces[1:-2], b"".join([*pieces[-2:], END])]


def prefill_answer(shape: Shape) -> list[bytes]:
    ticket = KVTicket(
        ticket_id="0" * 32,
        connector="mock",
        epoch="1",
        fingerprint="mock",
        token_hash=hash_tokens(shape.prompt),
        expires_at_s=time.time() + 3600,
        engine_id="prefill",
        request_id="mock",
        host="127.0.0.1",
        port=1,
        num_tokens=shape.num_prompt,
        block_ids=[list(range(shape.num_prompt // 16))],
        first_token=FirstToken(5),
    )
    return [b"".join(stream(shape, [5], ticket, {"prefill_started": 0.0, "prefill_done": 0.0}))]


def decode_answer(shape: Shape, moments: dict[str, float]) -> list[bytes]:
    pieces = stream(shape, [5 + number % 1000 for number in range(shape.num_output)], None, moments)
    return pieces if shape.step_s else [b"".join(pieces)]


def worker_info(role: str) -> bytes:
    info = WorkerInfo(
        engine_id=role,
        epoch="1",
        model="mock",
        role="both",
        fingerprint="mock",
        connector="mock",
        max_model_len=1_000_000,
        vocab_size=50_000,
        block_size=16,
        num_blocks=1000,
        num_free_blocks=1000,
        num_held_blocks=0,
        num_running=0,
        num_waiting=0,
    )
    return msgspec.json.encode(info)


@dataclass(eq=False)
class MockEngine(asyncio.Protocol):
    """One connection of an engine: what was prepared for the path, of the shape that fits the length of the body."""

    plain: dict[bytes, bytes]
    generated: dict[Shape, list[bytes]]
    _buffer: bytearray = field(default_factory=bytearray)
    _missing: int = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= self._missing and (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            length = int(head.partition(b"content-length: ")[2].split(b"\r\n", 1)[0] or 0)
            self._missing = end + 4 + length
            if len(self._buffer) < self._missing:
                return
            del self._buffer[: self._missing]
            self._missing = 0
            self._answer(head.split(b" ", 2)[1], length)

    def _answer(self, path: bytes, length: int) -> None:
        if path in self.plain:
            self._transport.write(self.plain[path])
            return
        shape = min(self.generated, key=lambda one: abs(len(one.request) - length))
        self._write_on(self.generated[shape], 0, shape.step_s)

    def _write_on(self, pieces: list[bytes], number: int, step_s: float) -> None:
        self._transport.write(pieces[number])
        if number + 1 < len(pieces) and not self._transport.is_closing():
            asyncio.get_running_loop().call_later(step_s, self._write_on, pieces, number + 1, step_s)


def run_engines(ready: multiprocessing.SimpleQueue[dict[str, int]], core: int, shapes: Sequence[Shape]) -> None:
    os.sched_setaffinity(0, {core})
    generated = {
        "prefill": {shape: prefill_answer(shape) for shape in shapes},
        "decode": {shape: decode_answer(shape, {"kv_requested": 0.0, "kv_ready": 0.0}) for shape in shapes},
        "whole": {shape: decode_answer(shape, {}) for shape in shapes},
    }

    async def serve() -> None:
        loop, ports = asyncio.get_running_loop(), {}
        for role, answers in generated.items():
            plain = {
                b"/inference/v1/abort_requests": http(b""),
                b"/health": http(b"{}"),
                b"/worker": http(worker_info(role)),
                b"/kv/leases": http(msgspec.json.encode(Leases(engine_id=role, epoch="1", leases=[]))),
            }
            server = await loop.create_server(
                lambda plain=plain, answers=answers: MockEngine(plain, answers),  # type: ignore[misc]
                "127.0.0.1",
                0,
                backlog=1024,
            )
            ports[role] = server.sockets[0].getsockname()[1]
        ready.put(ports)
        await asyncio.Event().wait()

    uvloop.run(serve())


@contextmanager
def engines(core: int, *shapes: Shape) -> Iterator[dict[str, int]]:
    """Their ports by role: prefill, decode, and one that does the whole of a request."""
    context = multiprocessing.get_context("spawn")
    ready: multiprocessing.SimpleQueue[dict[str, int]] = context.SimpleQueue()
    process = context.Process(target=run_engines, args=(ready, core, shapes))
    process.start()
    try:
        yield ready.get()
    finally:
        process.terminate()
        process.join()


# The load.


@dataclass(eq=False)
class Connection(asyncio.Protocol):
    """One connection, one request at a time. The answer must be whole and hold every token."""

    done: asyncio.Future[float] | None = None
    num_output: int = 0
    num_events: int = 0
    arrivals_s: list[float] = field(default_factory=list)
    _received: bytearray = field(default_factory=bytearray)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def send(self, shape: Shape) -> asyncio.Future[float]:
        self.done = asyncio.get_running_loop().create_future()
        self.num_output = shape.num_output
        self._received.clear()
        self.arrivals_s.clear()
        self.transport.write(shape.request)
        return self.done

    def data_received(self, data: bytes) -> None:
        self._received += data
        self.arrivals_s.append(time.perf_counter())
        if self._received.endswith(END) and self.done is not None:
            found = TOKENS.findall(self._received)
            if sum(group.count(b",") + 1 for group in found) != self.num_output or b"[DONE]" not in self._received:
                self.done.set_exception(RuntimeError(f"not a whole answer: {bytes(self._received[:600])!r}"))
            else:
                self.num_events += len(found)
                self.done.set_result(time.perf_counter())

    def connection_lost(self, error: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(RuntimeError("the connection was closed"))


@dataclass
class Load:
    """A client of one server, with as many connections as it needs."""

    port: int
    shape: Shape
    idle: list[Connection] = field(default_factory=list)
    num_events: int = 0
    longest_gap_s: float = 0.0

    async def connect(self) -> Connection:
        if self.idle:
            return self.idle.pop()
        _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self.port)
        return connection

    async def one(self, due_s: float) -> float:
        """Seconds from the time it was due to its last byte."""
        connection = await self.connect()
        before = connection.num_events
        ended_s = await connection.send(self.shape)
        self.num_events += connection.num_events - before
        times = connection.arrivals_s
        gaps_s = (later - earlier for earlier, later in pairwise(times))
        self.longest_gap_s = max(self.longest_gap_s, *gaps_s, 0.0)
        self.idle.append(connection)
        return ended_s - due_s

    async def at_rate(self, rate: float, seconds: float) -> list[float]:
        start_s = time.perf_counter() + 0.05
        tasks = []
        for number in range(int(rate * seconds)):
            due_s = start_s + number / rate
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(self.one(due_s)))
        return await asyncio.gather(*tasks)

    async def at_most(self, num_open: int, seconds: float) -> tuple[float, float]:
        """Requests and events a second with so many always open."""
        started_s, count, events_before = time.perf_counter(), 0, self.num_events

        async def client() -> None:
            nonlocal count
            while time.perf_counter() < started_s + seconds:
                await self.one(0.0)
                count += 1

        await asyncio.gather(*(client() for _ in range(num_open)))
        took_s = time.perf_counter() - started_s
        return count / took_s, (self.num_events - events_before) / took_s
