"""The faults of a run, all drawn from one seed: what becomes of connections, messages, machines and clocks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from faults.connector import KV_PORT
from faults.network import Address, Lane, Parcel

TRUE_TIME_S = 1_800_000_000.0
"""Unix time when a run begins."""

HANG_S = (0.1, 8.0)
PAUSE_S = (0.5, 6.0)
LATENCY_S = (0.00005, 0.0005)


@dataclass(frozen=True)
class Rates:
    """How often what goes wrong: of a connection, of a message of a hand-over, of an answer, of a step."""

    refuse: float = 0.0
    hang_connect: float = 0.0
    cut: float = 0.0
    stall: float = 0.0
    delay: float = 0.0
    fragment: float = 0.0
    busy: float = 0.0
    drop: float = 0.0
    repeat: float = 0.0
    swap: float = 0.0
    flip: float = 0.0
    truncate: float = 0.0
    crash: float = 0.0
    pause: float = 0.0
    slow_read: float = 0.0


CALM = Rates()
MODEST = Rates(
    refuse=0.1,
    hang_connect=0.05,
    cut=0.15,
    stall=0.1,
    delay=0.3,
    fragment=0.3,
    busy=0.1,
    drop=0.05,
    repeat=0.05,
    swap=0.05,
    flip=0.05,
    truncate=0.05,
    crash=0.02,
    pause=0.003,
    slow_read=0.3,
)


def draw_rates(rng: random.Random) -> Rates:
    """Some faults often, some never: a fault that comes alone is seen more clearly than one of many."""
    num_kinds = rng.choice((0, 1, 1, 2, 3, 5, len(fields(Rates))))
    often = rng.choice((0.3, 1.0, 3.0))
    chosen = set(rng.sample([each.name for each in fields(Rates)], num_kinds))
    if not chosen:
        return CALM
    return Rates(**{name: getattr(MODEST, name) * rng.uniform(0.5, 2.0) * often for name in sorted(chosen)})


@dataclass
class Storm:
    """The weather of one run. After `end` nothing goes wrong any more, except what already has."""

    rng: random.Random
    rates: Rates
    tampers: bool = False
    crash: Callable[[str], None] = lambda machine: None
    log: list[tuple[float, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_faults: int = 0

    @property
    def is_over(self) -> bool:
        return self.rates is CALM

    def end(self) -> None:
        self.rates = CALM

    def note(self, text: str) -> None:
        self.log.append((asyncio.get_running_loop().time(), text))

    def happens(self, fault: str) -> bool:
        rate: float = getattr(self.rates, fault)
        does = rate > 0 and self.rng.random() < rate
        self.num_faults += does
        return does

    def wall_s(self, skew_s: float) -> float:
        return TRUE_TIME_S + asyncio.get_running_loop().time() + skew_s

    def step_s(self, machine: str) -> float:
        """How long the next step of an engine takes."""
        if self.happens("pause"):
            pause_s = self.rng.uniform(*PAUSE_S)
            self.note(f"{machine} stands still for {pause_s:.1f} s")
            return pause_s
        return self.rng.uniform(0.001, 0.008)

    def read_s(self) -> float:
        """How long a consumer takes to read some of a producer's memory."""
        return self.rng.expovariate(1.0) if self.happens("slow_read") else 0.001

    def is_busy(self) -> bool:
        return self.happens("busy")

    # virtual_net.Weather

    async def admit(self, client: str, address: Address) -> None:
        await asyncio.sleep(self.rng.uniform(*LATENCY_S))
        if self.happens("refuse"):
            self.note(f"{client} is refused by {address}")
            raise ConnectionRefusedError(111, "Connection refused")
        if self.happens("hang_connect"):
            self.note(f"{client} waits for a connection to {address}")
            await asyncio.sleep(self.rng.uniform(*HANG_S))

    def lane(self, sender: str, receiver: str, address: Address) -> Lane:
        if address[1] == KV_PORT:
            return MessageLane(self, sender, receiver)
        return ByteLane(self, f"{sender} to {receiver}")


class ByteLane:
    """A direction of a TCP connection: its bytes come late, in pieces, or no more."""

    def __init__(self, storm: Storm, name: str) -> None:
        rng = storm.rng
        self._storm = storm
        self._name = name
        self._cut_at = rng.randrange(4000) if storm.happens("cut") else None
        self._stall_at = rng.randrange(4000) if storm.happens("stall") else None
        self._is_late = storm.happens("delay")
        self._in_pieces = storm.happens("fragment")
        self._num_bytes = 0

    def carry(self, data: bytes) -> list[Parcel]:
        begin, self._num_bytes = self._num_bytes, self._num_bytes + len(data)
        delay_s = self._storm.rng.uniform(*LATENCY_S)
        if self._storm.is_over:
            return [Parcel(data, delay_s)]
        if self._is_late:
            delay_s += self._storm.rng.expovariate(20.0)
        if self._stall_at is not None and self._stall_at < self._num_bytes:
            delay_s += self._storm.rng.uniform(*HANG_S)
            self._stall_at = None
            self._storm.note(f"{self._name}: nothing for {delay_s:.1f} s")
        if self._cut_at is not None and self._cut_at < self._num_bytes:
            self._storm.note(f"{self._name}: cut after {self._cut_at} bytes")
            return [Parcel(data[: self._cut_at - begin], delay_s, cuts=True)]
        if self._in_pieces and len(data) > 1:
            middle = self._storm.rng.randrange(1, len(data))
            return [Parcel(data[:middle], delay_s), Parcel(data[middle:], 0.0001)]
        return [Parcel(data, delay_s)]


class MessageLane:
    """A direction of a hand-over's conversation, where each write is a message, or the bytes of blocks."""

    def __init__(self, storm: Storm, sender: str, receiver: str) -> None:
        self._storm = storm
        self._sides = (sender, receiver)
        self._name = f"{sender} to {receiver} (kv)"
        self._kept: bytes | None = None
        self._num_messages = 0

    def carry(self, data: bytes) -> list[Parcel]:
        self._num_messages += 1
        parcels = self._tampered(data)
        if self._storm.happens("crash"):
            self._storm.note(f"{self._name}: crash at message {self._num_messages}")
            self._storm.crash(self._storm.rng.choice(self._sides))
        return parcels

    def _tampered(self, data: bytes) -> list[Parcel]:
        storm, rng = self._storm, self._storm.rng
        delay_s = rng.uniform(*LATENCY_S) + (rng.expovariate(10.0) if storm.happens("delay") else 0.0)
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return [Parcel(data, delay_s), Parcel(kept, 0.0001)]
        if storm.happens("stall"):
            delay_s += rng.uniform(*HANG_S)
            self._note(f"late by {delay_s:.1f} s")
        if storm.happens("cut"):
            self._note("cut")
            return [Parcel(b"", delay_s, cuts=True)]
        if storm.happens("truncate"):
            self._note("truncated")
            return [Parcel(data[: rng.randrange(len(data))], delay_s, cuts=True)]
        if not storm.tampers:
            return [Parcel(data, delay_s)]
        return [Parcel(each, delay_s) for each in self._forged(data)]

    def _forged(self, data: bytes) -> list[bytes]:
        """What TCP never does by itself, and a broken machine between may."""
        storm, rng = self._storm, self._storm.rng
        if storm.happens("drop"):
            self._note("lost")
            return []
        if storm.happens("repeat"):
            self._note("twice")
            return [data, data]
        if storm.happens("swap"):
            self._note("kept until the next")
            self._kept = data
            return []
        if storm.happens("flip"):
            self._note("one bit flipped")
            at = rng.randrange(len(data))
            return [data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]]
        return [data]

    def _note(self, what: str) -> None:
        self._storm.note(f"{self._name}: message {self._num_messages} {what}")
