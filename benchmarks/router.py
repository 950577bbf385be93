"""What the router adds to a request, and how many split requests one core of it can carry.

    python benchmarks/router.py [--rate 500] [--seconds 8]

Two mock engines answer at once, so all that is left is the router and the network of this host. The router is the
`fourhop router` command, alone on one core; engines and load share another. Latency is measured from the moment at
which a request was due (open loop, so a slow answer delays nothing but itself) to its last byte; "added" is the split
request through the router minus the same request sent straight to a decode engine. The largest rate is measured with
`CONCURRENCY` requests always open, that of `LONG` prompts with `LONG_OPEN`; where the router did not use nearly all of
its core, the rate is that of a busy machine, not the router's. Chunks are measured with `NUM_STREAMS` streams whose
engine sends each a token in every step, more than the router carries: counted are the events that reach clients, so
tokens that pile up and travel in one event count once. The longest stall is how late an event of some calm streams
comes while `LONGEST` prompts are let in. Every answer is checked. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from fourhop.router.app import Router
from fourhop.router.config import GoodputConfig, RouterConfig
from fourhop.router.policy import EngineRole
from fourhop.router.prefixes import Holder, pages_of
from fourhop.router.run import Run
from fourhop.router.worker import Worker
from fourhop.wire.generate import GenerateChunk, GenerateRequest, SamplingParams
from fourhop.wire.moments import Timeline
from fourhop.wire.ticket import KVTicket
from fourhop.wire.worker import Leases, PrefixRequest, WorkerInfo
from router_mock import Load, Shape, engines, worker_info

USUAL = Shape(512, 16)
LONG = Shape(100_000, 4)
LONGEST = Shape(200_000, 4)
STREAM = Shape(16, 512, step_s=0.002)
CALM = Shape(16, 256, step_s=0.02)
CONCURRENCY = 32
LONG_OPEN = 4
NUM_STREAMS = 64
NUM_CALM = 8
LONGEST_RATE = 2.0
READY_S = 30.0
NUM_WORKERS = 1000
NUM_PAGES = 1_000_000
ROUTER_CORE, *_, LOAD_CORE = sorted(os.sched_getaffinity(0)) * 2


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
    known = [[start * 1000 + token for token in range(USUAL.num_prompt)] for start in range(64)]
    for number, prompt in enumerate(known):
        index.record(pages_of(prompt, 64, ""), holders[number % num_workers])
    while len(index) < num_pages:
        size = len(index)
        index.record(range(-size * 8, -size * 8 + 8), holders[size % num_workers])
    took_s = []
    for number in range(num_placements):
        params = SamplingParams(max_tokens=USUAL.num_output, seed=1)
        prompt = known[number % 64] if number % 2 else USUAL.prompt
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


@dataclass
class Bench:
    """A router between mock engines, and how much of its core it has used."""

    port: int
    pid: int
    ports: dict[str, int]

    def load(self, shape: Shape) -> Load:
        return Load(self.port, shape)

    async def at_most(self, shape: Shape, num_open: int, seconds: float) -> dict[str, float]:
        """The largest rate: requests and events a second, milliseconds of processor time a request, and how much of its
        core the router used.
        """
        load = self.load(shape)
        await load.at_most(num_open, min(1.0, seconds))
        before_s, started_s = cpu_s(self.pid), time.perf_counter()
        rps, events_per_s = await load.at_most(num_open, seconds)
        busy = (cpu_s(self.pid) - before_s) / (time.perf_counter() - started_s)
        return {"rps": rps, "events_per_s": events_per_s, "cpu_ms": busy / rps * 1e3, "busy": busy}

    async def added(self, rate: float, seconds: float) -> dict[str, float]:
        """What the router adds at this rate."""
        direct, split = Load(self.ports["whole"], USUAL), self.load(USUAL)
        for load in (direct, split):
            await load.at_rate(rate, 1.0)
        direct_p50, direct_p99 = percentiles(await direct.at_rate(rate, seconds))
        before_s = cpu_s(self.pid)
        split_p50, split_p99 = percentiles(await split.at_rate(rate, seconds))
        return {
            "rate": rate,
            "direct_p50_ms": direct_p50,
            "direct_p99_ms": direct_p99,
            "split_p50_ms": split_p50,
            "split_p99_ms": split_p99,
            "added_p50_ms": split_p50 - direct_p50,
            "added_p99_ms": split_p99 - direct_p99,
            "router_cpu_ms": (cpu_s(self.pid) - before_s) / (rate * seconds) * 1e3,
        }

    async def stall_ms(self, seconds: float) -> tuple[float, float]:
        """How late the latest event of calm streams is, alone and while the longest prompts come in."""

        async def latest_ms(*more: Coroutine[Any, Any, object]) -> float:
            calm = self.load(CALM)
            await asyncio.gather(calm.at_most(NUM_CALM, seconds), *more)
            return max(0.0, calm.longest_gap_s - CALM.step_s) * 1e3

        longest = self.load(LONGEST)
        await longest.at_rate(LONGEST_RATE, 1.0)
        return await latest_ms(), await latest_ms(longest.at_rate(LONGEST_RATE, seconds))


@contextmanager
def bench(*shapes: Shape) -> Iterator[Bench]:
    """A router with a core of its own; everything else is on the last one."""
    port = free_port()
    with engines(LOAD_CORE, *shapes) as ports, router(ports, ROUTER_CORE, port) as pid:
        yield Bench(port, pid, ports)


def measure(rate: float, seconds: float) -> dict[str, float]:
    os.sched_setaffinity(0, {LOAD_CORE})
    with bench(USUAL) as one:
        result = uvloop.run(one.added(rate, seconds))
        most = uvloop.run(one.at_most(USUAL, CONCURRENCY, seconds))
        result |= {"split_rps": most["rps"], "split_cpu_ms": most["cpu_ms"], "split_busy": most["busy"]}
    with bench(LONG) as one:
        long = uvloop.run(one.at_most(LONG, LONG_OPEN, seconds))
        result |= {"rps_100k": long["rps"], "cpu_100k_ms": long["cpu_ms"]}
    with bench(STREAM) as one:
        streams = uvloop.run(one.at_most(STREAM, NUM_STREAMS, seconds))
        result |= {"chunks_per_s": streams["events_per_s"], "tokens_per_s": streams["rps"] * STREAM.num_output}
    with bench(CALM, LONGEST) as one:
        alone_ms, stall_ms = uvloop.run(one.stall_ms(seconds))
        result |= {"calm_gap_ms": alone_ms, "stall_200k_ms": stall_ms}
    return result | {"placement_us": placement_us(NUM_WORKERS, NUM_PAGES)}


def report(result: dict[str, float]) -> None:
    print(f"{USUAL.num_prompt} prompt and {USUAL.num_output} output tokens, streamed; {result['rate']:.0f} a second\n")
    print(f"{'':<12}{'p50 ms':>10}{'p99 ms':>10}")
    for row in ("direct", "split", "added"):
        print(f"{row:<12}{result[f'{row}_p50_ms']:>10.2f}{result[f'{row}_p99_ms']:>10.2f}")
    print(f"\nprocessor time of the router: {result['router_cpu_ms']:.2f} ms a request")
    print(
        f"largest rate, {CONCURRENCY} open: {result['split_rps']:.0f} split requests a second, "
        f"{result['split_cpu_ms']:.2f} ms of processor time each, on {result['split_busy']:.0%} of the core"
    )
    print(
        f"{LONG.num_prompt} prompt tokens, {LONG_OPEN} open: {result['rps_100k']:.1f} a second, "
        f"{result['cpu_100k_ms']:.1f} ms of processor time each"
    )
    print(f"{NUM_STREAMS} streams: {result['chunks_per_s']:.0f} events, {result['tokens_per_s']:.0f} tokens a second")
    print(
        f"latest event of {NUM_CALM} calm streams: {result['calm_gap_ms']:.1f} ms late, "
        f"{result['stall_200k_ms']:.1f} ms while {LONGEST_RATE:g} prompts of {LONGEST.num_prompt} come a second"
    )
    print(f"placement among {NUM_WORKERS} engines and {NUM_PAGES} pages: {result['placement_us']:.0f} µs a request\n")
    print(json.dumps({key: round(value, 3) for key, value in result.items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0, help="requests a second of the latency rows")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each measurement")
    options = parser.parse_args()
    report(measure(options.rate, options.seconds))
