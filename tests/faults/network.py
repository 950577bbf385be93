"""Connections between machines of a `VirtualLoop`, and the faults they may have.

A `Connection` is two `End`s. What one end writes passes a `Lane`, which decides what arrives, when, and whether the
connection survives it; the ends themselves know no faults.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from fourhop.tokens.names import Found

MACHINE: contextvars.ContextVar[str] = contextvars.ContextVar("machine", default="client")
"""Where a task runs: whose connections die with whom."""

APART_S = 1e-6
"""Two parcels never arrive at one moment: timers of one moment have no order."""

Factory = Callable[[], asyncio.Protocol]
Address = tuple[str, int]


@dataclass(frozen=True)
class Parcel:
    """Bytes that arrive `delay_s` after what was written before; `cuts` breaks the connection behind them."""

    data: bytes
    delay_s: float = 0.0
    cuts: bool = False


async def by_name(host: str, port: int) -> Found:
    """A `LookUp` of a network whose machines are reached by their names."""
    return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))]


class Lane(Protocol):
    """One direction of one connection."""

    def carry(self, data: bytes) -> list[Parcel]:
        """What becomes of a write."""


class Weather(Protocol):
    """Decides for every connection what it will be like."""

    async def admit(self, client: str, address: Address) -> None:
        """Before a connection is made. Raises ConnectionError; may take its time."""

    def lane(self, sender: str, receiver: str, address: Address) -> Lane: ...


@dataclass
class Listener:
    """A listening address. `context` is the machine's, in which its protocols run."""

    address: Address
    factory: Factory
    context: contextvars.Context
    machine: str


@dataclass
class Network:
    """Who listens where, and every open connection."""

    weather: Weather
    listeners: dict[Address, Listener] = field(default_factory=dict)
    connections: list[Connection] = field(default_factory=list)

    def listen(self, address: Address, factory: Factory) -> None:
        """The machine that calls listens from now on, until `silence` or `vanish`."""
        self.listeners[address] = Listener(address, factory, contextvars.copy_context(), MACHINE.get())

    async def connect(self, factory: Factory, host: str, port: int) -> tuple[asyncio.Transport, asyncio.Protocol]:
        client, address = MACHINE.get(), (host, port)
        await self.weather.admit(client, address)
        listener = self.listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(111, "Connection refused")
        connection = Connection(self, client, listener.machine)
        near = End(connection, contextvars.copy_context(), self.weather.lane(client, listener.machine, address))
        far = End(connection, listener.context, self.weather.lane(listener.machine, client, address))
        near.peer, far.peer = far, near
        connection.ends = (near, far)
        self.connections.append(connection)
        protocol = factory()
        near.open(protocol)
        far.loop.call_soon(far.open, listener.context.run(listener.factory), context=listener.context)
        return near, protocol

    def silence(self, machine: str) -> None:
        """A machine listens no more; what is open stays."""
        self.listeners = {where: each for where, each in self.listeners.items() if each.machine != machine}

    def vanish(self, machine: str, *, silently: bool) -> None:
        """A machine's process is gone: the others see their connections break, or if `silently` nothing at all."""
        self.silence(machine)
        for connection in [each for each in self.connections if machine in each.machines]:
            connection.lose(machine, silently=silently)

    def break_all(self) -> None:
        """Every connection that is still there breaks."""
        for connection in list(self.connections):
            connection.cut()


class Connection:
    """Two ends; it is over for good when both are."""

    ends: tuple[End, End]

    def __init__(self, network: Network, client: str, server: str) -> None:
        self.machines = (client, server)
        self._network = network

    def cut(self) -> None:
        for end in self.ends:
            end.lose(ConnectionResetError(104, "Connection reset by peer"))

    def lose(self, machine: str, *, silently: bool) -> None:
        """One side's machine is gone."""
        for end, owner in zip(self.ends, self.machines, strict=True):
            if owner == machine:
                end.is_gone = True
            if owner == machine or not silently:
                end.lose(ConnectionResetError(104, "Connection reset by peer"))

    def forget_if_over(self) -> None:
        if all(end.is_over for end in self.ends) and self in self._network.connections:
            self._network.connections.remove(self)


class End(asyncio.Transport):
    """One end, as its protocol sees it."""

    peer: End

    def __init__(self, connection: Connection, context: contextvars.Context, lane: Lane) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self.is_over = False
        self.is_gone = False
        self._connection = connection
        self._context = context
        self._lane = lane
        self._protocol: asyncio.Protocol | None = None
        self._closing = False
        self._paused = False
        self._unread: list[bytes | None] = []
        self._arrives_at_s = 0.0

    def open(self, protocol: asyncio.Protocol) -> None:
        if self.is_over:
            return
        self._protocol = protocol
        protocol.connection_made(self)
        self._deliver()

    # asyncio.Transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or not data:
            return
        for parcel in self._lane.carry(bytes(data)):
            if parcel.data:
                self._send(parcel.data, parcel.delay_s)
            if parcel.cuts:
                self.loop.call_later(parcel.delay_s + APART_S, self._connection.cut)
                self._closing = True
                return

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._send(None, 0.0)
            self.loop.call_soon(self.lose, None)

    def abort(self) -> None:
        self._closing = True
        self.loop.call_soon(self._connection.cut)

    def is_closing(self) -> bool:
        return self._closing or self.is_over

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self.loop.call_soon(self._deliver, context=self._context)

    def is_reading(self) -> bool:
        return not self._paused

    def can_write_eof(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Buffers are as large as it takes."""

    def get_write_buffer_size(self) -> int:
        return 0

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast("asyncio.Protocol", protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    # What the other end sends.

    def _send(self, data: bytes | None, delay_s: float) -> None:
        """Bytes arrive in the order in which they were sent; None is the end."""
        self._arrives_at_s = max(self._arrives_at_s, self.loop.time()) + delay_s + APART_S
        self.loop.call_at(self._arrives_at_s, self.peer._arrive, data, context=self.peer._context)

    def _arrive(self, data: bytes | None) -> None:
        if self.is_over and not self.is_gone and data:
            self.peer.lose(ConnectionResetError(104, "Connection reset by peer"))
        self._unread.append(data)
        self._deliver()

    def _deliver(self) -> None:
        while self._unread and self._protocol is not None and not self._paused and not self.is_over:
            data = self._unread.pop(0)
            if data is not None:
                self._protocol.data_received(data)
            elif not self._protocol.eof_received():
                self._closing = True
                self.lose(None)

    def lose(self, error: Exception | None) -> None:
        """This end is over: its protocol is told, unless its process is gone too."""
        if self.is_over:
            return
        self.is_over = self._closing = True
        self._connection.forget_if_over()
        if self._protocol is not None and not self.is_gone:
            self.loop.call_soon(self._protocol.connection_lost, error, context=self._context)
