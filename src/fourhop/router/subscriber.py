"""Listens to engines' cache events, and asks for those that were missed. Needs pyzmq."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import msgspec
import zmq
import zmq.asyncio

from fourhop.router.cacheindex import CacheIndex
from fourhop.wire.events import EventBatch, sequence_bytes, sequence_number

log = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 5.0
"""Patience with each message of a replay."""

Lost = Callable[[str, str, str], None]
"""Told of what was not heard: the engine, a word for the cause, and why."""

_decoder = msgspec.msgpack.Decoder(EventBatch)


class Missed(Exception):
    """Events that cannot be had any more: what is known of the engine may be wrong."""


class Subscriptions:
    """One for each engine that tells of its cache, on one ZMQ context."""

    def __init__(self, index: CacheIndex, lost: Lost) -> None:
        self._index = index
        self._lost = lost
        self._context = zmq.asyncio.Context()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def follow(self, engine: str, endpoint: str, replay_endpoint: str) -> None:
        """From now on; what was known of an earlier life of the engine is forgotten."""
        self.leave(engine)
        subscriber = Subscriber(self._context, self._index, self._lost, engine, endpoint, replay_endpoint)
        self._tasks[engine] = asyncio.create_task(subscriber.run(), name=f"cache events of {engine}")

    def leave(self, engine: str) -> None:
        """The engine does not tell of its cache any more."""
        task = self._tasks.pop(engine, None)
        if task is not None:
            task.cancel()
        self._index.forget(engine)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for engine in list(self._tasks):
            self.leave(engine)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)


class Subscriber:
    """Keeps `index` true of `engine` while `run` runs. Without a replay address a gap costs all that was known."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        index: CacheIndex,
        lost: Lost,
        engine: str,
        endpoint: str,
        replay_endpoint: str,
    ) -> None:
        self._context = context
        self._index = index
        self._lost = lost
        self._engine = engine
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._next = 0
        self._replayed_to = -1  # numbers up to it may arrive a second time, from the subscription

    async def run(self) -> None:
        """Until it is cancelled, or cannot go on: then nothing is known of the engine."""
        try:
            await self._listen()
        except Exception:  # a task of its own: nobody else would tell
            log.exception("the cache events of %s cannot be heard", self._engine)
            self._index.forget(self._engine)
            self._lost(self._engine, "unheard", "its subscription failed")

    async def _listen(self) -> None:
        socket = self._context.socket(zmq.SUB)
        try:
            socket.subscribe(b"")
            socket.connect(self._endpoint)
            await self._start_over()
            while True:
                frames = await socket.recv_multipart()
                try:
                    await self._take(*read(frames))
                except (ValueError, msgspec.DecodeError) as error:
                    self._lost(self._engine, "unreadable", f"what it published is no event: {error}")
        finally:
            socket.close(linger=0)

    async def _take(self, number: int, batch: EventBatch) -> None:
        if number <= self._replayed_to:
            return
        self._replayed_to = -1
        if number < self._next:
            log.info("%s counts its cache events anew", self._engine)
            await self._start_over()
        elif number > self._next and not await self._catch_up():
            self._lost(self._engine, "missed", f"what came before batch {number} is not to be had any more")
        if number >= self._next:
            self._index.apply(self._engine, batch.events)
            self._next = number + 1

    async def _start_over(self) -> None:
        self._index.clear(self._engine)
        self._next = 0
        await self._catch_up()

    async def _catch_up(self) -> bool:
        """Have replayed what comes next. What cannot be replayed is not known, nor is anything before it: False."""
        try:
            async for number, batch in self._replayed(self._next):
                if number != self._next:
                    raise Missed(f"batches {self._next} to {number - 1} are gone")
                self._index.apply(self._engine, batch.events)
                self._next = number + 1
                self._replayed_to = number
        except (Missed, TimeoutError, ValueError, msgspec.DecodeError) as error:
            self._index.clear(self._engine)
            log.info("the cache of %s is known from now on only: %s", self._engine, error or "no replay came")
            return False
        return True

    async def _replayed(self, first: int) -> AsyncIterator[tuple[int, EventBatch]]:
        if not self._replay_endpoint:
            raise Missed("it has no replay")
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.connect(self._replay_endpoint)
            await socket.send_multipart((b"", sequence_bytes(first)))
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    frames = await socket.recv_multipart()
                if len(frames) >= 2 and sequence_number(frames[-2]) < 0:
                    return
                yield read(frames)
        finally:
            socket.close(linger=0)


def read(frames: list[bytes]) -> tuple[int, EventBatch]:
    """The number and the batch of a message. Raises ValueError or DecodeError for what is none."""
    if len(frames) < 2:
        raise ValueError(f"{len(frames)} frames")
    return sequence_number(frames[-2]), _decoder.decode(frames[-1])
