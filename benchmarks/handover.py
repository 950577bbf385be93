"""What a hand-over costs against one memory copy of the same bytes, in the same run.

    python benchmarks/handover.py

Two processes: this one pulls, a child produces. A round times each row once, one after the other, and the table shows
medians over the rounds. The last line is JSON. Rates over loopback are compared with a bare socket between the same two
processes. "scattered" means that no two blocks are neighbours on either side. "overlap" is what is left of a pull that
goes along with a prefill: the producer publishes CHUNK_BLOCKS blocks every PACE_S seconds, and the time runs from the
moment of the last ones.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from fourhop.kv.config import KVTransferConfig
from fourhop.kv.connector import Connector, Progress, Pulled
from fourhop.kv.connectors import open_connector
from fourhop.kv.layout import BlockLayout, KVPool, runs
from fourhop.wire.ticket import KVTicket

NUM_TOKENS = 2000
LAYOUT = BlockLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, itemsize=4, num_blocks=260)
"""SmolLM2-135M in float32, with room for the blocks twice."""

NUM_BLOCKS = LAYOUT.blocks_for(NUM_TOKENS)
NUM_BYTES = NUM_BLOCKS * LAYOUT.num_planes * LAYOUT.block_bytes
CONTIGUOUS = list(range(NUM_BLOCKS))
SCATTERED = list(range(0, 2 * NUM_BLOCKS, 2))
CONNECTORS = ("shm", "tcp")
CHUNK_BLOCKS = 16
PACE_S = 0.03
"""As a prefill of 8,500 tokens a second: many times what one core does."""

NUM_ROUNDS = 15
WAIT_S = 60.0


@dataclass(frozen=True)
class Offer:
    """What the producing process hands to this one: tickets by connector and block list, and a bare socket's port."""

    contiguous: dict[str, list[KVTicket]]
    scattered: dict[str, list[KVTicket]]
    early: dict[str, list[KVTicket]]
    raw_port: int


class Consumer:
    """An engine's side of a connector: pulls, waits for the event, and says how long it took."""

    def __init__(self, name: str, pool: KVPool) -> None:
        self._arrived = threading.Semaphore(0)
        self.connector = open_connector(KVTransferConfig(name), pool, "consumer", self._arrived.release)

    def time_pull(self, ticket: KVTicket, block_ids: list[int]) -> float:
        """Milliseconds from `pull` until the engine has the event."""
        started_s = time.perf_counter()
        self.connector.pull(ticket, block_ids, [])
        return (self._wait(ticket) - started_s) * 1e3

    def time_overlap(self, ticket: KVTicket, block_ids: list[int], producer: Connection) -> float:
        """Milliseconds from the moment when the producer has the last blocks until the engine has the event."""
        self.connector.pull(ticket, block_ids, [])
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
    child = multiprocessing.get_context("spawn").Process(target=produce, args=(theirs,))
    child.start()
    try:
        offer: Offer = ours.recv()
        times = run_rounds(offer, ours)
    finally:
        ours.send(None)
        child.join()
    return {name: statistics.median(values) for name, values in times.items()}


def run_rounds(offer: Offer, producer: Connection) -> dict[str, list[float]]:
    source, pool = KVPool(LAYOUT), KVPool(LAYOUT)
    consumers = {name: Consumer(name, pool) for name in CONNECTORS}
    buffer = np.zeros(NUM_BYTES, np.uint8)
    times: dict[str, list[float]] = {}

    def note(row: str, elapsed_ms: float) -> None:
        times.setdefault(row, []).append(elapsed_ms)

    with socket.create_connection(("127.0.0.1", offer.raw_port)) as raw:
        for number in range(NUM_ROUNDS + 1):
            for suffix, tickets, block_ids in (
                ("", offer.contiguous, CONTIGUOUS),
                ("_scattered", offer.scattered, SCATTERED),
            ):
                note(f"copy{suffix}_ms", time_ms(partial(copy, source, pool, block_ids)))
                for name, consumer in consumers.items():
                    note(f"{name}{suffix}_ms", consumer.time_pull(tickets[name][number], block_ids))
                    assert (pool.planes[:, block_ids] == 7).all()
            for name, consumer in consumers.items():
                note(f"{name}_overlap_ms", consumer.time_overlap(offer.early[name][number], CONTIGUOUS, producer))
                assert (pool.planes[:, CONTIGUOUS] == 7).all()
            note("raw_ms", time_ms(partial(receive_raw, raw, buffer.data)))
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


def produce(pipe: Connection) -> None:
    """The child: holds blocks for every pull of the run, and serves the bare socket."""
    pool = KVPool(LAYOUT)
    pool.planes[:] = 7
    connectors = {name: open_connector(KVTransferConfig(name), pool, "producer", lambda: None) for name in CONNECTORS}
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=serve_raw, args=(listener,), daemon=True).start()
        pipe.send(
            Offer(
                contiguous={name: publish(each, CONTIGUOUS, "contiguous") for name, each in connectors.items()},
                scattered={name: publish(each, SCATTERED, "scattered") for name, each in connectors.items()},
                early={name: publish(each, CONTIGUOUS, "early", num_ready=0) for name, each in connectors.items()},
                raw_port=listener.getsockname()[1],
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
    return Progress(block_ids[:num_ready], [], b"" if num_ready == NUM_BLOCKS else None)


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


def report(times: dict[str, float]) -> None:
    """A table of ratios, and last one line of JSON."""
    print(f"{NUM_TOKENS} tokens, {NUM_BLOCKS} blocks, {NUM_BYTES / 1e6:.0f} MB; medians of {NUM_ROUNDS} rounds\n")
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
    }
    print()
    print(json.dumps({key: round(value, 3) for key, value in {**times, **ratios}.items()}))


if __name__ == "__main__":
    report(measure_connectors())
