"""What a hand-over costs against one memory copy of the same bytes, in the same run.

    python benchmarks/handover.py [--rounds 5]

First two engines behind a router, as `fourhop up` starts them: from prefill's last step to decode's first, the whole
hand-over after the other ("serial") or with decode reserved and blocks travelling while the prompt is computed
("overlap"), and conversations whose turns add 500 tokens. Then the connectors alone.

Two processes: this one pulls, a child produces. A round times each row once, one after the other, and the table shows
medians over the rounds. The last line is JSON. `tcp` is compared with a bare socket between the same two processes,
`nixl` with one NIXL read of as many bytes, both in the same rounds. `store` reads from a folder what was saved there.
"scattered" means that no two blocks are neighbours on either side. "overlap" is what is left of a pull that goes along
with a prefill: the producer publishes CHUNK_BLOCKS blocks every PACE_S seconds, and the time runs from the moment of
the last ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import select
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fourhop.bench.handovers import Handovers, measure_pair
from fourhop.bench.launch import running
from fourhop.bench.setups import Command, Setup
from fourhop.kv.config import ConnectorOptions, KVTransferConfig
from fourhop.kv.connector import Connector, Progress, Pulled, Released
from fourhop.kv.connectors import open_connector
from fourhop.kv.layout import BlockLayout, KVPool, runs
from fourhop.kv.nixl import load_nixl
from fourhop.tokens.connection import open_session
from fourhop.wire.ticket import KVTicket

NUM_TOKENS = 2000
LAYOUT = BlockLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, itemsize=4, num_blocks=260)
"""SmolLM2-135M in float32, with room for the blocks twice."""

NUM_BLOCKS = LAYOUT.blocks_for(NUM_TOKENS)
NUM_BYTES = NUM_BLOCKS * LAYOUT.num_planes * LAYOUT.block_bytes
CONTIGUOUS = list(range(NUM_BLOCKS))
SCATTERED = list(range(0, 2 * NUM_BLOCKS, 2))
CONNECTORS = ("shm", "tcp", "nixl", "store")
OVERLAPPING = ("shm", "tcp", "nixl")
CHUNK_BLOCKS = 16
PACE_S = 0.03
"""As a prefill of 8,500 tokens a second: many times what one core does."""

NUM_ENGINE_BLOCKS = 320
"""Few, so that the first round, which is not counted, has touched the pages of all of them."""

NUM_ROUNDS = 15
WAIT_S = 60.0


@dataclass(frozen=True)
class Offer:
    """What the producing process hands to this one: tickets by connector and block list, and the yardsticks' ports."""

    contiguous: dict[str, list[KVTicket]]
    scattered: dict[str, list[KVTicket]]
    early: dict[str, list[KVTicket]]
    raw_port: int
    raw_nixl_port: int


class Consumer:
    """An engine's side of a connector: pulls, waits for the event, and says how long it took."""

    def __init__(self, name: str, pool: KVPool, url: str) -> None:
        self._arrived = threading.Semaphore(0)
        self.connector = open_connector(config_of(name, url), pool, "consumer", self._arrived.release)

    def time_pull(self, ticket: KVTicket, block_ids: list[int]) -> float:
        """Milliseconds from `pull` until the engine has the event."""
        started_s = time.perf_counter()
        self.connector.pull(ticket, block_ids, names_of(block_ids))
        return (self._wait(ticket) - started_s) * 1e3

    def time_overlap(self, ticket: KVTicket, block_ids: list[int], producer: Connection) -> float:
        """Milliseconds from the moment when the producer has the last blocks until the engine has the event."""
        self.connector.pull(ticket, block_ids, names_of(block_ids))
        producer.send(ticket)
        pulled_s = self._wait(ticket)
        complete_s: float = producer.recv()
        return (pulled_s - complete_s) * 1e3

    def _wait(self, ticket: KVTicket) -> float:
        """When the engine had the event."""
        assert self._arrived.acquire(timeout=WAIT_S)
        events = self.connector.poll()
        pulled_s = time.perf_counter()
        assert events == [Pulled(ticket.ticket_id, NUM_BYTES)], events
        return pulled_s


def measure_connectors() -> dict[str, float]:
    """Median milliseconds of a copy, a bare socket, and a pull over each connector."""
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as url:
        child = multiprocessing.get_context("spawn").Process(target=produce, args=(theirs, url))
        child.start()
        theirs.close()  # so that a child that dies is noticed
        try:
            offer: Offer = ours.recv()
            times = run_rounds(offer, ours, url)
        finally:
            ours.send(None)
            child.join()
    return {name: statistics.median(values) for name, values in times.items()}


def run_rounds(offer: Offer, producer: Connection, url: str) -> dict[str, list[float]]:
    source, pool = KVPool(LAYOUT), KVPool(LAYOUT)
    consumers = {name: Consumer(name, pool, url) for name in CONNECTORS}
    buffer = np.zeros(NUM_BYTES, np.uint8)
    times: dict[str, list[float]] = {}

    def note(row: str, elapsed_ms: float) -> None:
        times.setdefault(row, []).append(elapsed_ms)

    raw_nixl = RawNixl(offer.raw_nixl_port, KVPool(LAYOUT))
    with socket.create_connection(("127.0.0.1", offer.raw_port)) as raw, closing(raw_nixl):
        for number in range(NUM_ROUNDS + 1):
            for suffix, tickets, block_ids in (
                ("", offer.contiguous, CONTIGUOUS),
                ("_scattered", offer.scattered, SCATTERED),
            ):
                note(f"copy{suffix}_ms", time_ms(partial(copy, source, pool, block_ids)))
                for name, consumer in consumers.items():
                    note(f"{name}{suffix}_ms", consumer.time_pull(tickets[name][number], block_ids))
                    assert (pool.planes[:, block_ids] == 7).all()
            for name in OVERLAPPING:
                ticket = offer.early[name][number]
                note(f"{name}_overlap_ms", consumers[name].time_overlap(ticket, CONTIGUOUS, producer))
                assert (pool.planes[:, CONTIGUOUS] == 7).all()
            note("raw_ms", time_ms(partial(receive_raw, raw, buffer.data)))
            note("raw_nixl_ms", time_ms(raw_nixl.read))
    for consumer in consumers.values():
        consumer.connector.close()
    first_shm_ms = times["shm_ms"][0]
    return {"shm_first_ms": [first_shm_ms], **{row: values[1:] for row, values in times.items()}}


def copy(source: KVPool, target: KVPool, block_ids: list[int]) -> None:
    """The yardstick: the copy that any hand-over must make, with both pools at hand."""
    for src, dst, length in runs(block_ids, block_ids):
        np.copyto(target.planes[:, dst : dst + length], source.planes[:, src : src + length])


def time_ms(action: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    action()
    return (time.perf_counter() - started_s) * 1e3


def receive_raw(raw: socket.socket, buffer: memoryview) -> None:
    raw.sendall(b"x")
    while buffer:
        buffer = buffer[raw.recv_into(buffer) :]


class RawNixl:
    """The yardstick for `nixl`: one read of all bytes between pools of two agents that do nothing else."""

    def __init__(self, port: int, pool: KVPool) -> None:
        self._pool = pool
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._agent = open_agent("raw consumer", pool)
        metadata, address = msgspec.msgpack.decode(self._sock.recv(2**16), type=tuple[bytes, int])
        self._sock.sendall(b"x")
        self._peer = self._agent.add_remote_agent(metadata).decode()
        self._ours = self._agent.get_xfer_descs([(pool.planes.ctypes.data, NUM_BYTES, 0)], "DRAM")
        self._theirs = self._agent.get_xfer_descs([(address, NUM_BYTES, 0)], "DRAM")

    def read(self) -> None:
        handle = self._agent.initialize_xfer("READ", self._ours, self._theirs, self._peer)
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(0.0005)
            state = self._agent.check_xfer_state(handle)
        handle.release()
        assert state == "DONE", state

    def close(self) -> None:
        self._sock.close()


def open_agent(name: str, pool: KVPool) -> Any:
    api = load_nixl().api
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(pool.planes.ctypes.data, pool.planes.nbytes, 0, "")], "DRAM")
    return agent


def serve_raw_nixl(listener: socket.socket) -> None:
    """Let UCX work for as long as the consumer is there, but only once it has asked for that."""
    pool = KVPool(LAYOUT)
    agent = open_agent("raw producer", pool)
    connection, _ = listener.accept()
    with connection:
        connection.sendall(msgspec.msgpack.encode((agent.get_agent_metadata(), pool.planes.ctypes.data)))
        connection.recv(1)
        while not select.select([connection], [], [], 0.001)[0]:
            agent.get_new_notifs()


def config_of(name: str, url: str) -> KVTransferConfig:
    return KVTransferConfig(name, kv_connector_extra_config=ConnectorOptions(url=url))


def produce(pipe: Connection, url: str) -> None:
    """The child: holds blocks for every pull of the run, and serves the yardsticks."""
    pool = KVPool(LAYOUT)
    pool.planes[:] = 7
    connectors = {name: open_connector(config_of(name, url), pool, "producer", lambda: None) for name in CONNECTORS}
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as raw,
        closing(socket.create_server(("127.0.0.1", 0))) as nixl,
    ):
        threading.Thread(target=serve_raw, args=(raw,), daemon=True).start()
        threading.Thread(target=serve_raw_nixl, args=(nixl,), daemon=True).start()
        contiguous = {name: publish(each, CONTIGUOUS, "contiguous") for name, each in connectors.items()}
        scattered = {name: publish(each, SCATTERED, "scattered") for name, each in connectors.items()}
        wait_until_saved(connectors["store"], 2 * (NUM_ROUNDS + 1))
        pipe.send(
            Offer(
                contiguous=contiguous,
                scattered=scattered,
                early={name: publish(connectors[name], CONTIGUOUS, "early", num_ready=0) for name in OVERLAPPING},
                raw_port=raw.getsockname()[1],
                raw_nixl_port=nixl.getsockname()[1],
            )
        )
        while (ticket := pipe.recv()) is not None:
            pipe.send(compute(ticket, connectors[ticket.connector]))
    for connector in connectors.values():
        connector.close()


def compute(ticket: KVTicket, connector: Connector) -> float:
    """Publish a ticket's blocks at a prefill's pace; returns when the last ones were there, which both processes read
    off the same clock."""
    for num_ready in range(CHUNK_BLOCKS, NUM_BLOCKS, CHUNK_BLOCKS):
        time.sleep(PACE_S)
        connector.publish(ticket, progress_of(CONTIGUOUS, num_ready))
    time.sleep(PACE_S)
    complete_s = time.perf_counter()
    connector.publish(ticket, progress_of(CONTIGUOUS, NUM_BLOCKS))
    return complete_s


def progress_of(block_ids: list[int], num_ready: int) -> Progress:
    return Progress(block_ids[:num_ready], names_of(block_ids[:num_ready]), b"" if num_ready == NUM_BLOCKS else None)


def names_of(block_ids: list[int]) -> list[bytes]:
    return [f"block {block_id}".encode() for block_id in block_ids]


def wait_until_saved(store: Connector, num_tickets: int) -> None:
    """Until the store has everything that was published."""
    while num_tickets:
        num_tickets -= sum(isinstance(event, Released) for event in store.poll())
        time.sleep(0.01)


def publish(connector: Connector, block_ids: list[int], kind: str, num_ready: int = NUM_BLOCKS) -> list[KVTicket]:
    ticket = KVTicket(
        ticket_id="",
        connector="",
        epoch="producer",
        fingerprint="",
        token_hash="",
        expires_at_s=0.0,
        engine_id="producer",
        request_id="",
        host="",
        port=0,
        num_tokens=NUM_TOKENS,
        block_ids=[block_ids],
    )
    progress = progress_of(block_ids, num_ready)
    names = [f"{kind} {number}" for number in range(NUM_ROUNDS + 1)]
    return [connector.publish(msgspec.structs.replace(ticket, ticket_id=name), progress) for name in names]


def serve_raw(listener: socket.socket) -> None:
    data = np.zeros(NUM_BYTES, np.uint8)
    connection, _ = listener.accept()
    with connection:
        while connection.recv(1):
            connection.sendall(data.data)


async def measure_engines(num_rounds: int) -> Handovers:
    """A pair over shm, started and stopped here, the default model in it."""
    pair = ("--prefill", "1", "--decode", "1", "--connector", "shm", "--num-blocks", str(NUM_ENGINE_BLOCKS))
    command = Command(("fourhop", "up", *pair, "--port", "0"))
    with tempfile.TemporaryDirectory() as folder:
        async with (
            open_session() as session,
            running(Setup("pair", "other", (command,)), session, Path(folder)) as site,
        ):
            prefill, decode = [url.removesuffix("/metrics") for url in site.metrics_urls]
            return await measure_pair(site.url, prefill, decode, session, num_rounds)


def report_engines(pair: Handovers, copy_ms: float) -> dict[str, float]:
    """Two tables of what the engines did; returns the figures."""
    rows = {"shm_serial_ms": pair.serial_s, **{f"shm_overlap_{n}_ms": took for n, took in pair.overlap_s.items()}}
    figures = {name: took_s * 1e3 for name, took_s in rows.items()}
    print(f"{'two engines, shm':<24}{'ms':>8}{'/ copy':>8}")
    for name, value in figures.items():
        print(f"{name.removesuffix('_ms').replace('_', ' '):<24}{value:>8.1f}{value / copy_ms:>8.2f}")
    first_s = pair.turns[0].ttft_s
    print(f"\n{'turn':<8}{'prompt':>8}{'computed':>10}{'TTFT ms':>10}{'/ turn 1':>10}")
    for number, turn in enumerate(pair.turns, 1):
        counts = f"{number:<8}{turn.num_prompt:>8}{turn.num_computed:>10}"
        print(f"{counts}{turn.ttft_s * 1e3:>10.0f}{turn.ttft_s / first_s:>10.2f}")
    last = pair.turns[-1]
    overlap_ms = max(pair.overlap_s.values()) * 1e3
    return {
        **figures,
        "shm_overlap_ms": overlap_ms,
        "turn5_over_turn1": last.ttft_s / first_s,
        "turn5_computed": float(last.num_computed),
    }


def report(times: dict[str, float], pair: Handovers) -> None:
    """Tables of ratios, and last one line of JSON."""
    figures = report_engines(pair, times["copy_ms"])
    print(f"\n{NUM_TOKENS} tokens, {NUM_BLOCKS} blocks, {NUM_BYTES / 1e6:.0f} MB; medians of {NUM_ROUNDS} rounds\n")
    print(f"{'':<24}{'ms':>8}{'GB/s':>8}{'/ copy':>8}")
    for row, value in times.items():
        base = times["copy_scattered_ms" if "scattered" in row else "copy_ms"]
        label = row.removesuffix("_ms").replace("_", " ")
        rate = "" if "overlap" in row else f"{NUM_BYTES / value / 1e6:.1f}"  # most bytes moved before the time ran
        print(f"{label:<24}{value:>8.1f}{rate:>8}{value / base:>8.2f}")
    ratios = {
        "shm_limit_ms": 1.3 * times["copy_ms"] + 3.0,
        "shm_over_copy": times["shm_ms"] / times["copy_ms"],
        "tcp_over_raw": times["raw_ms"] / times["tcp_ms"],
        "nixl_over_raw": times["raw_nixl_ms"] / times["nixl_ms"],
    }
    print()
    print(json.dumps({key: round(value, 3) for key, value in {**times, **ratios, **figures}.items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What a hand-over costs.")
    parser.add_argument("--rounds", type=int, default=5)
    engines = asyncio.run(measure_engines(parser.parse_args().rounds))
    report(measure_connectors(), engines)
