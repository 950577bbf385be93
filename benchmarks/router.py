"""What the router adds to a request, and how many split requests one core of it can carry.

    python benchmarks/router.py [--rate 500] [--seconds 8]

Two mock engines answer at once, so all that is left is the router and the network of this host. The router is the
`fourhop router` command, alone on one core; engines and load share another. Latency is measured from the moment at
which a request was due (open loop, so a slow answer delays nothing but itself) to its last byte; "added" is the split
request through the router minus the same request sent straight to a decode engine. The largest rate is measured with
`CONCURRENCY` requests always open. Every answer is checked. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from fourhop.router.app import Router
from fourhop.router.config import GoodputConfig, RouterConfig
from fourhop.router.policy import EngineRole
from fourhop.router.prefixes import Holder, pages_of
from fourhop.router.run import Run
from fourhop.router.worker import Worker
from fourhop.tokens.dialect import GENERATE_PATH
from fourhop.wire.generate import ChunkChoice, GenerateChunk, GenerateRequest, SamplingParams, StreamOptions, Usage
from fourhop.wire.moments import Timeline
from fourhop.wire.sse import DONE_EVENT, encode_event
from fourhop.wire.ticket import FirstToken, KVTicket, hash_tokens
from fourhop.wire.worker import Leases, PrefixRequest, WorkerInfo

NUM_PROMPT = 512
NUM_OUTPUT = 16
CONCURRENCY = 32
PROMPT = list(range(1000, 1000 + NUM_PROMPT))
READY_S = 30.0
NUM_WORKERS = 1000
NUM_PAGES = 1_000_000
END = b"0\r\n\r\n"
TOKENS = re.compile(rb'"token_ids":\[([0-9,]+)\]')


# The mock engines: HTTP by hand, answers prepared, so that they cost next to nothing.


def http(body: bytes, content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def stream(tokens: list[int], ticket: KVTicket | None, moments: dict[str, float]) -> bytes:
    """A whole streamed answer: an early ticket if there is one, and an event for each token."""
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
    usage = Usage(NUM_PROMPT, len(tokens), NUM_PROMPT + len(tokens))
    chunks.append(GenerateChunk(request_id="mock", choices=[], usage=usage))
    events = [*(encode_event(msgspec.json.encode(chunk)) for chunk in chunks), DONE_EVENT]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events) + END


def worker_info(role: str) -> bytes:
    info = WorkerInfo(
        engine_id=role,
        epoch="1",
        model="mock",
        role="both",
        fingerprint="mock",
        connector="mock",
        max_model_len=4096,
        vocab_size=50_000,
        block_size=16,
        num_blocks=1000,
        num_free_blocks=1000,
        num_held_blocks=0,
        num_running=0,
        num_waiting=0,
    )
    return msgspec.json.encode(info)


def prefill_answer() -> bytes:
    ticket = KVTicket(
        ticket_id="0" * 32,
        connector="mock",
        epoch="1",
        fingerprint="mock",
        token_hash=hash_tokens(PROMPT),
        expires_at_s=time.time() + 3600,
        engine_id="prefill",
        request_id="mock",
        host="127.0.0.1",
        port=1,
        num_tokens=NUM_PROMPT,
        block_ids=[list(range(NUM_PROMPT // 16))],
        first_token=FirstToken(5),
    )
    return stream([5], ticket, {"prefill_started": 0.0, "prefill_done": 0.0})


class MockEngine(asyncio.Protocol):
    """Answers every request on a connection with what was prepared for its path."""

    def __init__(self, answers: dict[bytes, bytes]) -> None:
        self._answers = answers
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            _, _, length = head.partition(b"content-length: ")
            total = end + 4 + int(length.split(b"\r\n", 1)[0] or 0)
            if len(self._buffer) < total:
                return
            self._transport.write(self._answers[head.split(b" ", 2)[1]])
            self._buffer = self._buffer[total:]


def run_engines(ready: multiprocessing.SimpleQueue[dict[str, int]], core: int) -> None:
    os.sched_setaffinity(0, {core})
    generated = {
        "prefill": prefill_answer(),
        "decode": stream(list(range(5, 5 + NUM_OUTPUT)), None, {"kv_requested": 0.0, "kv_ready": 0.0}),
        "whole": stream(list(range(5, 5 + NUM_OUTPUT)), None, {}),
    }

    async def serve() -> None:
        ports = {}
        for role, answer in generated.items():
            answers = {
                GENERATE_PATH.encode(): answer,
                b"/inference/v1/abort_requests": http(b""),
                b"/health": http(b"{}"),
                b"/worker": http(worker_info(role)),
                b"/kv/leases": http(msgspec.json.encode(Leases(engine_id=role, epoch="1", leases=[]))),
            }
            loop = asyncio.get_running_loop()
            server = await loop.create_server(lambda answers=answers: MockEngine(answers), "127.0.0.1", 0)  # type: ignore[misc]
            ports[role] = server.sockets[0].getsockname()[1]
        ready.put(ports)
        await asyncio.Event().wait()

    uvloop.run(serve())


# The load.


@dataclass
class Connection(asyncio.Protocol):
    """One connection, one request at a time. The answer must be whole and hold every token."""

    done: asyncio.Future[float] | None = None
    _received: bytearray = field(default_factory=bytearray)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def send(self, request: bytes) -> asyncio.Future[float]:
        self.done = asyncio.get_running_loop().create_future()
        self._received.clear()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._received.endswith(END) and self.done is not None:
            tokens = sum(group.count(b",") + 1 for group in TOKENS.findall(self._received))
            if tokens != NUM_OUTPUT or b"data: [DONE]" not in self._received:
                self.done.set_exception(RuntimeError(f"not a whole answer: {bytes(self._received[:600])!r}"))
            else:
                self.done.set_result(time.perf_counter())

    def connection_lost(self, error: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(RuntimeError("the connection was closed"))


@dataclass
class Load:
    """A client of one server, with as many connections as it needs."""

    port: int
    idle: list[Connection] = field(default_factory=list)

    @property
    def request(self) -> bytes:
        body = msgspec.json.encode(
            GenerateRequest(
                token_ids=PROMPT,
                sampling_params=SamplingParams(max_tokens=NUM_OUTPUT, seed=1),
                stream=True,
                stream_options=StreamOptions(include_usage=True),
            )
        )
        head = f"POST {GENERATE_PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def connect(self) -> Connection:
        if self.idle:
            return self.idle.pop()
        _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self.port)
        return connection

    async def one(self, request: bytes, due_s: float) -> float:
        """Seconds from the time it was due to its last byte."""
        connection = await self.connect()
        ended_s = await connection.send(request)
        self.idle.append(connection)
        return ended_s - due_s

    async def at_rate(self, rate: float, seconds: float) -> list[float]:
        request, start_s = self.request, time.perf_counter() + 0.05
        tasks = []
        for number in range(int(rate * seconds)):
            due_s = start_s + number / rate
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(self.one(request, due_s)))
        return await asyncio.gather(*tasks)

    async def at_most(self, seconds: float) -> float:
        """Requests a second with `CONCURRENCY` always open."""
        request, end_s, count = self.request, time.perf_counter() + seconds, 0

        async def client() -> None:
            nonlocal count
            while time.perf_counter() < end_s:
                await self.one(request, 0.0)
                count += 1

        started_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
        return count / (time.perf_counter() - started_s)


# Placement alone.


class Silent:
    """An engine that nobody asks: placement needs its name only."""

    engine_id = ""
    served = None

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        raise NotImplementedError

    async def check(self) -> WorkerInfo | None: ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def leases(self) -> Leases:
        raise NotImplementedError

    async def renew(self, ticket_ids: list[str]) -> list[KVTicket]:
        return []

    async def hold_prefix(self, request: PrefixRequest) -> dict[str, Any] | None: ...

    async def migrate(self, request_ids: list[str]) -> int:
        return 0

    def cut(self) -> None: ...

    async def refuse(self, transfer: dict[str, Any]) -> None: ...


def large_fleet(num_workers: int) -> list[Worker]:
    """Half of them for each role, with different loads."""
    silent, info = Silent(), msgspec.json.decode(worker_info("large"), type=WorkerInfo)
    workers = []
    for number in range(num_workers):
        role: EngineRole = "prefill" if number % 2 else "decode"
        workers.append(Worker(f"http://e{number}", role, silent, silent, info=info, down=None))
        workers[-1].in_flight = number * 7 % 13
    return workers


def placement_us(num_workers: int, num_pages: int, num_placements: int = 2000) -> float:
    """Microseconds to place one request by what is predicted, its prompt's beginning looked up; the median."""
    config = RouterConfig(("http://p",), ("http://d",), max_prefix_pages=num_pages)
    router = Router(config, GoodputConfig(placement="auto"), registry=CollectorRegistry())
    router.fleet.adopt(large_fleet(num_workers))
    for number in range(50):
        router.fleet.costs.prefill.learn(100 * number, 0.0002 * number)
        router.fleet.costs.step.learn(1 + number, 0.01 + 0.0001 * number)
    index, holders = router.conversations.index, [Holder(name, "1") for name in router.fleet.workers]
    known = [[start * 1000 + token for token in range(NUM_PROMPT)] for start in range(64)]
    for number, prompt in enumerate(known):
        index.record(pages_of(prompt, 64, ""), holders[number % num_workers])
    while len(index) < num_pages:
        size = len(index)
        index.record(range(-size * 8, -size * 8 + 8), holders[size % num_workers])
    took_s = []
    for number in range(num_placements):
        params = SamplingParams(max_tokens=NUM_OUTPUT, seed=1)
        prompt = known[number % 64] if number % 2 else PROMPT
        request = GenerateRequest(token_ids=prompt, sampling_params=params)
        run = Run(request, Timeline(time.monotonic()))
        started_s = time.perf_counter()
        placement = router.placer.place(run)
        took_s.append(time.perf_counter() - started_s)
        assert placement is not None
        router.progress.unreserve(run)
    return statistics.median(took_s) * 1e6


# The whole.


@contextmanager
def engines(core: int) -> Iterator[dict[str, int]]:
    context = multiprocessing.get_context("spawn")
    ready: multiprocessing.SimpleQueue[dict[str, int]] = context.SimpleQueue()
    process = context.Process(target=run_engines, args=(ready, core))
    process.start()
    try:
        yield ready.get()
    finally:
        process.terminate()
        process.join()


@contextmanager
def router(ports: dict[str, int], core: int, port: int) -> Iterator[int]:
    """The router's process id, once it is well."""
    command = [sys.executable, "-c", "from fourhop.cli import main; main()", "router", "--port", str(port)]
    for role in ("prefill", "decode"):
        command += [f"--{role}", f"http://127.0.0.1:{ports[role]}"]
    process = subprocess.Popen([*command, "--log-level", "warning"], preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    try:
        wait_until_well(f"http://127.0.0.1:{port}/health", process)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def wait_until_well(url: str, process: subprocess.Popen[bytes]) -> None:
    give_up_s = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < give_up_s:
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the router did not start")


def cpu_s(pid: int) -> float:
    """Processor time of a process so far (Linux, /proc)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentiles(seconds: list[float]) -> tuple[float, float]:
    """Median and 99th percentile, in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return cuts[49] * 1e3, cuts[98] * 1e3


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def measure(rate: float, seconds: float) -> dict[str, float]:
    cores = sorted(os.sched_getaffinity(0))
    router_core, load_core = cores[0], cores[-1]
    os.sched_setaffinity(0, {load_core})
    port = free_port()
    with engines(load_core) as ports, router(ports, router_core, port) as pid:

        async def run() -> dict[str, float]:
            direct, split = Load(ports["whole"]), Load(port)
            for load in (direct, split):
                await load.at_rate(rate, 1.0)
            direct_p50, direct_p99 = percentiles(await direct.at_rate(rate, seconds))
            before_s = cpu_s(pid)
            split_p50, split_p99 = percentiles(await split.at_rate(rate, seconds))
            router_cpu_ms = (cpu_s(pid) - before_s) / (rate * seconds) * 1e3
            largest = await split.at_most(seconds)
            return {
                "rate": rate,
                "direct_p50_ms": direct_p50,
                "direct_p99_ms": direct_p99,
                "split_p50_ms": split_p50,
                "split_p99_ms": split_p99,
                "added_p50_ms": split_p50 - direct_p50,
                "added_p99_ms": split_p99 - direct_p99,
                "router_cpu_ms": router_cpu_ms,
                "split_rps": largest,
                "placement_us": placement_us(NUM_WORKERS, NUM_PAGES),
            }

        return uvloop.run(run())


def report(result: dict[str, float]) -> None:
    print(f"{NUM_PROMPT} prompt and {NUM_OUTPUT} output tokens, streamed; {result['rate']:.0f} requests a second\n")
    print(f"{'':<12}{'p50 ms':>10}{'p99 ms':>10}")
    for row in ("direct", "split", "added"):
        print(f"{row:<12}{result[f'{row}_p50_ms']:>10.2f}{result[f'{row}_p99_ms']:>10.2f}")
    print(f"\nprocessor time of the router: {result['router_cpu_ms']:.2f} ms a request")
    print(
        f"placement among {NUM_WORKERS} engines and {NUM_PAGES} known pages: {result['placement_us']:.0f} µs a request"
    )
    print(f"largest rate, {CONCURRENCY} open: {result['split_rps']:.0f} split requests a second\n")
    print(json.dumps({key: round(value, 3) for key, value in result.items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0, help="requests a second of the latency rows")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each of the three measurements")
    options = parser.parse_args()
    report(measure(options.rate, options.seconds))
