"""Publishes an engine's cache events over ZMQ, as vLLM does, so that any router that reads vLLM's reads these.

Batches are published from the engine's thread, which never waits for a subscriber: a slow one misses some, sees the gap
in the numbers, and asks for them again at the replay socket.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from fourhop.kv.config import KVEventsConfig
from fourhop.service.fallbacks import Seldom
from fourhop.wire.errors import StartError
from fourhop.wire.events import REPLAY_END, Event, EventBatch, sequence_bytes, sequence_number

log = logging.getLogger(__name__)

STOP_S = 0.2
"""How often the replay thread looks whether it is to end."""


class EventPublisher:
    """Open from its construction until `close`. Raises StartError for an address that cannot be had."""

    def __init__(self, config: KVEventsConfig, wall_clock: Callable[[], float]) -> None:
        self._topic = config.topic.encode()
        self._wall_clock = wall_clock
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._seldom = Seldom(log)
        self._stopping = threading.Event()
        self._context = zmq.Context()
        try:
            self._publish = self._bind(zmq.PUB, config.endpoint, config.hwm)
            replay = self._bind(zmq.ROUTER, config.replay_endpoint, config.hwm) if config.replay_endpoint else None
        except StartError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = bound_to(self._publish)
        self.replay_endpoint = "" if replay is None else bound_to(replay)
        self._thread = None
        if replay is not None:
            self._thread = threading.Thread(
                target=self._serve_replay, args=(replay,), name="kv-events-replay", daemon=True
            )
            self._thread.start()

    def publish(self, events: list[Event]) -> None:
        """One batch; nothing if there are none. From one thread only."""
        if not events:
            return
        payload = msgspec.msgpack.encode(EventBatch(self._wall_clock(), events, 0))
        number, self._next = self._next, self._next + 1
        self._sent.append((number, payload))
        try:
            self._publish.send_multipart((self._topic, sequence_bytes(number), payload), zmq.NOBLOCK)
        except zmq.Again:
            self._seldom.tell("events_dropped", "a batch of cache events was dropped; subscribers will ask for it")

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._context.destroy(linger=0)

    def _bind(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise StartError(f"KV events at {endpoint}: {error}") from None
        return socket

    def _serve_replay(self, socket: zmq.Socket[bytes]) -> None:
        while not self._stopping.is_set():
            if socket.poll(int(STOP_S * 1000)):
                self._answer(socket, socket.recv_multipart())
        socket.close(linger=0)

    def _answer(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        """All that is kept from the number that was asked for on, and then the end."""
        try:
            first = sequence_number(frames[-1])
        except ValueError as error:
            log.warning("a replay was asked for that cannot be: %s", error)
            return
        for number, payload in list(self._sent):
            if number >= first:
                socket.send_multipart([*frames[:-1], self._topic, sequence_bytes(number), payload])
        socket.send_multipart([*frames[:-1], self._topic, REPLAY_END, b""])


def bound_to(socket: zmq.Socket[bytes]) -> str:
    """Where a socket listens: with a port that was chosen for it."""
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()
