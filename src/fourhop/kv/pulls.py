"""What every connector needs around its copying: worker threads for pulls, and the events that `poll` returns."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from fourhop.kv.connector import Event, Notify, Pulled, PullError, PullFailed

logger = logging.getLogger(__name__)

NUM_WORKERS = 16
"""Pulls that copy at once; more wait their turn, and their time runs meanwhile."""

OnStep = Callable[[str, str], None]
"""Called on a pull's thread with ("claimed" | "copied", ticket_id): where tests and fault injection step in."""


def no_step(step: str, ticket_id: str) -> None:
    """The `OnStep` of production."""


class Outbox:
    """Events on their way to the engine's thread, each taken once. Any thread may put."""

    def __init__(self, notify: Notify) -> None:
        self._events: deque[Event] = deque()
        self._notify = notify

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._notify()

    def take(self) -> list[Event]:
        """What was put since the last call. Only the engine's thread takes."""
        return [self._events.popleft() for _ in range(len(self._events))]


class Pulls:
    """Runs pulls on worker threads; each ends in exactly one event.

    A pull is a function of its deadline (on the monotonic clock, in seconds) that returns the number of bytes copied,
    or raises. It must respect the deadline; one that waits for a worker has its deadline running.
    """

    def __init__(self, outbox: Outbox, timeout_s: float) -> None:
        self._outbox = outbox
        self._timeout_s = timeout_s
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="kv-pull")
        self._closed = False

    def start(self, ticket_id: str, pull: Callable[[float], int]) -> None:
        if self._closed:
            self._outbox.put(PullFailed(ticket_id, "unreachable", CLOSED))
            return
        future = self._workers.submit(pull, time.monotonic() + self._timeout_s)
        future.add_done_callback(lambda done: self._outbox.put(outcome(ticket_id, done)))

    def close(self) -> None:
        """Fail the pulls that wait, and wait for those that run."""
        self._closed = True
        self._workers.shutdown(wait=True, cancel_futures=True)


CLOSED = "this engine's connector is closed"


def outcome(ticket_id: str, done: Future[int]) -> Pulled | PullFailed:
    """The one event of a pull that ended: its bytes, or its error as a cause."""
    if done.cancelled():
        return PullFailed(ticket_id, "unreachable", CLOSED)
    match done.exception():
        case None:
            return Pulled(ticket_id, done.result())
        case PullError() as error:
            return PullFailed(ticket_id, error.cause, error.message)
        case TimeoutError():
            return PullFailed(ticket_id, "timeout", "the producer did not answer in time")
        case OSError() as error:
            return PullFailed(ticket_id, "unreachable", f"the producer cannot be reached: {error}")
        case msgspec.DecodeError() as error:
            return PullFailed(ticket_id, "protocol", f"the producer sent something else than an answer: {error}")
        case error:
            logger.error("pull of ticket %s broke", ticket_id, exc_info=error)
            return PullFailed(ticket_id, "internal", "the pull broke; see the engine's log")
