"""A connector for a `VirtualLoop`: the conversation of `kv.control` over the network that has faults.

What decides is the real thing: the table of holds, the messages, their frames, the causes. Only waiting is different:
tasks instead of threads. As with `tcp` the bytes come over the connection, or as with `shm` the consumer reads the
producer's memory, in several steps, so that it can be too late.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from faults.network import Network
from fourhop.kv.config import ConnectorOptions
from fourhop.kv.connector import CAUSES, Event, Notify, Progress, Pulled, PullError, PullFailed, Released, Renewed
from fourhop.kv.control import (
    HEADER,
    MAX_ANSWER_BYTES,
    VERSION,
    Claim,
    Confirmed,
    Decline,
    Granted,
    More,
    Opening,
    Ready,
    Refused,
    Release,
    Renew,
    Sum,
    check_seal,
    seal,
)
from fourhop.kv.holds import Holds, Step, Want
from fourhop.kv.layout import KVPool
from fourhop.kv.pulls import Outbox, Pull, outcome
from fourhop.kv.tcp import stretches
from fourhop.wire.ticket import KVTicket

NAME = "sim"
KV_PORT = 9000
NUM_READS = 3
"""Steps in which a consumer reads a producer's memory."""

Message = TypeVar("Message", bound=msgspec.Struct)


@dataclass
class Place:
    """What a connector shares with the others of its world: the network, every machine's memory by its name, and how
    long a step of reading it takes."""

    network: Network
    memory: dict[str, KVPool]
    reads_memory: bool
    has_checksums: bool
    read_s: Callable[[], float]
    keep_alive_s: float


class SimConnector:
    """A `Connector` on `machine`. Made inside the event loop, used from there only."""

    name = NAME

    def __init__(
        self, place: Place, machine: str, options: ConnectorOptions, pool: KVPool, epoch: str, notify: Notify
    ) -> None:
        self.holds = Holds(epoch, pool.layout)
        self.outbox = Outbox(notify)
        self.pulls: dict[Pull, asyncio.Task[Pulled]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self._place = place
        self._machine = machine
        self._timeout_s = options.pull_timeout_s
        self._pool = pool
        self._epoch = epoch
        self._news = asyncio.Event()
        place.memory[machine] = pool
        place.network.listen((machine, KV_PORT), self._accept)

    def publish(self, ticket: KVTicket, progress: Progress) -> KVTicket:
        self.holds.publish(ticket, progress)
        self._tell()
        return msgspec.structs.replace(ticket, connector=NAME, host=self._machine, port=KV_PORT)

    def pull(self, ticket: KVTicket, block_ids: list[int], names: list[bytes], skip_blocks: int = 0) -> None:
        pull = Pull(ticket)
        task = asyncio.get_running_loop().create_task(self._pull(pull, list(block_ids), skip_blocks))
        self.pulls[pull] = task
        task.add_done_callback(lambda done: self._finish(pull, done))

    def release(self, ticket_id: str) -> None:
        self.holds.withdraw(ticket_id)
        self._tell()
        for pull in [each for each in self.pulls if each.ticket.ticket_id == ticket_id]:
            pull.end(PullError("cancelled", "the pull was given up"))
            self._note(pull.ticket, Decline(ticket_id, pull.ticket.epoch))

    def renew(self, ticket: KVTicket) -> None:
        self._note(ticket, Renew(ticket.ticket_id, ticket.epoch))

    def poll(self) -> list[Event]:
        return self.outbox.take()

    def close(self) -> None:
        self.holds.close()
        self._tell()
        for pull, task in self.pulls.items():
            pull.end(PullError("unreachable", "this engine's connector is closed"))
            task.cancel()
        for other in self.tasks:
            other.cancel()

    @property
    def is_idle(self) -> bool:
        return not self.pulls and not self.tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            raise task.exception() or AssertionError

    def _tell(self) -> None:
        """Wake everybody who follows a hold."""
        self._news.set()
        self._news = asyncio.Event()

    # The consumer's side.

    def _finish(self, pull: Pull, task: asyncio.Task[Pulled]) -> None:
        del self.pulls[pull]
        done: Future[Pulled] = Future()
        if task.cancelled():
            done.cancel()
        elif (error := task.exception()) is not None:
            done.set_exception(error)
        else:
            done.set_result(task.result())
        event = outcome(pull, done)
        if isinstance(event, PullFailed) and event.cause == "internal":
            raise AssertionError(event) from task.exception()
        self.outbox.put(event)

    async def _pull(self, pull: Pull, target: list[int], skip_blocks: int) -> Pulled:
        ticket = pull.ticket
        geometry = self._pool.layout.geometry()
        claim = Claim(
            connector=NAME,
            ticket_id=ticket.ticket_id,
            epoch=ticket.epoch,
            geometry=geometry,
            skip_blocks=skip_blocks,
            num_blocks=len(target),
        )
        async with self._wire_to(ticket, pull) as wire:
            wire.send(claim)
            await wire.expect(Granted)
            tail = await self._copy(wire, ticket, target)
            wire.send(Release())
            await wire.expect(Confirmed)
        layout = self._pool.layout
        return Pulled(ticket.ticket_id, len(target) * layout.num_planes * layout.block_bytes, tail)

    async def _copy(self, wire: Wire, ticket: KVTicket, target: list[int]) -> bytes:
        num_copied = 0
        while True:
            ready = await wire.expect(Ready)
            blocks = target[num_copied : num_copied + len(ready.block_ids)]
            num_copied += len(ready.block_ids)
            if num_copied > len(target) or (ready.tail is not None and num_copied < len(target)):
                raise PullError("protocol", "the producer gives other blocks than were asked for")
            await self._receive(wire, ticket, ready.block_ids, blocks)
            if ready.tail is not None:
                return ready.tail
            wire.send(More())

    async def _receive(self, wire: Wire, ticket: KVTicket, source: list[int], target: list[int]) -> None:
        if not source:
            return
        if self._place.reads_memory:
            memory = self._place.memory[ticket.host]
            for start in range(NUM_READS):
                await asyncio.sleep(self._place.read_s())
                pairs = slice(start, None, NUM_READS)
                self._pool.planes[:, target[pairs]] = memory.planes[:, source[pairs]]
            return
        size = len(source) * self._pool.layout.num_planes * self._pool.layout.block_bytes
        payload = await wire.read(size)
        if self._place.has_checksums and (await wire.expect(Sum)).checksum != zlib.crc32(payload):
            raise PullError("corrupt", "the blocks were changed on their way")
        data = memoryview(payload)
        for stretch in stretches(self._memory, self._pool.layout, target):
            stretch[:] = data[: len(stretch)]
            data = data[len(stretch) :]

    @property
    def _memory(self) -> memoryview:
        return self._pool.planes.reshape(-1).view(np.uint8).data

    @contextlib.asynccontextmanager
    async def _wire_to(self, ticket: KVTicket, pull: Pull) -> AsyncIterator[Wire]:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._timeout_s):
            _, wire = await loop.create_connection(lambda: Wire(self._timeout_s), ticket.host, ticket.port)
        try:
            with pull.stopping(wire.cut):
                pull.check()
                yield wire
        finally:
            wire.close()

    def _note(self, ticket: KVTicket, note: Renew | Decline) -> None:
        async def send() -> None:
            with contextlib.suppress(OSError, PullError):
                async with self._wire_to(ticket, Pull(ticket)) as wire:
                    wire.send(note)

        self._spawn(send())

    # The producer's side.

    def _accept(self) -> Wire:
        wire = Wire(self._timeout_s)
        self._spawn(self._answer(wire))
        return wire

    async def _answer(self, wire: Wire) -> None:
        try:
            match await wire.receive(Opening):
                case Claim() as claim:
                    await self._answer_claim(wire, claim)
                case Renew(ticket_id, epoch) if epoch == self._epoch and self.holds.stands(ticket_id):
                    self.outbox.put(Renewed(ticket_id))
                case Decline(ticket_id, epoch) if epoch == self._epoch:
                    self._let_go(ticket_id)
        except (OSError, msgspec.DecodeError):
            return
        finally:
            wire.close()

    async def _answer_claim(self, wire: Wire, claim: Claim) -> None:
        want = Want(claim.ticket_id, claim.epoch, claim.geometry, claim.skip_blocks, claim.num_blocks)
        try:
            if (claim.version, claim.connector) != (VERSION, NAME):
                raise PullError("protocol", "a claim of another version")
            self.holds.claim(want)
        except PullError as refusal:
            wire.send(Refused(refusal.cause, refusal.message))
            return
        try:
            await self._hand_over(wire, want)
        except PullError as refusal:
            wire.send(Refused(refusal.cause, refusal.message))
        finally:
            self._let_go(claim.ticket_id)

    async def _hand_over(self, wire: Wire, want: Want) -> None:
        self.outbox.put(Renewed(want.ticket_id))
        wire.send(Granted())
        async for block_ids, tail in self._steps(want):
            self.outbox.put(Renewed(want.ticket_id))
            wire.send(Ready(block_ids, tail))
            if block_ids and not self._place.reads_memory:
                payload = b"".join(stretches(self._memory, self._pool.layout, block_ids))
                wire.write(payload)
                if self._place.has_checksums:
                    wire.send(Sum(zlib.crc32(payload)))
            if tail is None:
                await wire.receive(More)
        await wire.receive(Release)
        self.holds.confirm(want.ticket_id)
        self._tell()
        self.outbox.put(Released(want.ticket_id))
        wire.send(Confirmed())

    async def _steps(self, want: Want) -> AsyncIterator[Step]:
        for step in self.holds.steps(want, 0.0):
            if step.block_ids or step.tail is not None or not await self._has_news():
                yield step

    async def _has_news(self) -> bool:
        """Wait for a change of any hold, for as long as a producer may be silent."""
        try:
            await asyncio.wait_for(self._news.wait(), self._place.keep_alive_s)
        except TimeoutError:
            return False
        return True

    def _let_go(self, ticket_id: str) -> None:
        if self.holds.decline(ticket_id):
            self.outbox.put(Released(ticket_id))


class Wire(asyncio.Protocol):
    """`control.Channel` for a task: frames and raw bytes, and at most `timeout_s` of waiting for the other side."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._data = bytearray()
        self._lost = False
        self._arrived = asyncio.Event()
        self._num_sent = self._num_received = 0

    def send(self, message: msgspec.Struct) -> None:
        self.write(seal(msgspec.msgpack.encode(message), self._num_sent))
        self._num_sent += 1

    def write(self, data: bytes) -> None:
        """Raw bytes."""
        assert self._transport is not None
        self._transport.write(data)

    async def expect(self, kind: type[Message]) -> Message:
        answer = msgspec.msgpack.decode(await self._frame(), type=Granted | Ready | Sum | Confirmed | Refused)
        if isinstance(answer, Refused):
            raise PullError(answer.cause if answer.cause in CAUSES else "protocol", answer.message)
        if not isinstance(answer, kind):
            raise msgspec.DecodeError(f"{type(answer).__name__} where {kind.__name__} was due")
        return answer

    async def receive(self, kind: Any) -> Any:
        return msgspec.msgpack.decode(await self._frame(), type=kind)

    async def read(self, num_bytes: int) -> bytes:
        """The next bytes. Raises TimeoutError or ConnectionError."""
        async with asyncio.timeout(self._timeout_s):
            while len(self._data) < num_bytes:
                if self._lost:
                    raise ConnectionError("the connection was closed")
                self._arrived.clear()
                await self._arrived.wait()
        data = bytes(self._data[:num_bytes])
        del self._data[:num_bytes]
        return data

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def _frame(self) -> bytes:
        num_bytes, checksum = HEADER.unpack(await self.read(HEADER.size))
        if not 0 < num_bytes <= MAX_ANSWER_BYTES:
            raise msgspec.DecodeError(f"a frame of {num_bytes} bytes")
        body = await self.read(num_bytes)
        check_seal(body, checksum, self._num_received)
        self._num_received += 1
        return body

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        self._arrived.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._arrived.set()
