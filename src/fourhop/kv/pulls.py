"""What every connector needs around its copying: worker threads for pulls, and the events that `poll` returns."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from fourhop.kv.connector import Event, Notify, Pulled, PullError, PullFailed
from fourhop.wire.ticket import KVTicket

logger = logging.getLogger(__name__)

OnStep = Callable[[str, str], None]
"""Called on a pull's thread with (step, ticket_id): where tests and fault injection step in. The steps: "claimed",
"ready" whenever the producer said how far it is (which may be no further), "copied" when every block is in place."""


def no_step(step: str, ticket_id: str) -> None:
    """The `OnStep` of production."""


@dataclass(frozen=True)
class Conduct:
    """How a connector behaves in time, and who looks on. Production uses the defaults.

    `clock` is monotonic, in seconds. While a consumer waits for blocks, the producer speaks at least every
    `keep_alive_s`. `num_workers` pulls run at once, most of them asleep until blocks become ready; further ones
    queue. A sleeping thread costs some 50 kB, which is why pulls have threads and no event loop.
    """

    on_step: OnStep = no_step
    clock: Callable[[], float] = time.monotonic
    keep_alive_s: float = 1.0
    num_workers: int = 512


PRODUCTION = Conduct()


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


class Pull:
    """One pull between its start and its event. `end` ends it from outside, whatever it waits for."""

    def __init__(self, ticket: KVTicket) -> None:
        self.ticket = ticket
        self.reason: PullError | None = None
        self._stop: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def end(self, reason: PullError) -> None:
        with self._lock:
            self.reason = reason
            if self._stop is not None:
                self._stop()

    def check(self) -> None:
        """Raises PullError when it was ended."""
        if self.reason is not None:
            raise self.reason

    @contextlib.contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """For as long as this is open, `end` calls `stop`. Raises PullError when it was ended before."""
        with self._lock:
            self.check()
            self._stop = stop
        try:
            yield
        finally:
            with self._lock:
                self._stop = None


class Pulls:
    """Runs pulls on worker threads; each ends in exactly one event.

    A pull that waited longer than `timeout_s` for a worker has timed out; from then on its timeouts are its own.
    """

    def __init__(self, outbox: Outbox, timeout_s: float, conduct: Conduct) -> None:
        self._outbox = outbox
        self._timeout_s = timeout_s
        self._clock = conduct.clock
        self._workers = ThreadPoolExecutor(conduct.num_workers, thread_name_prefix="kv-pull")
        self._open: dict[Pull, Future[Pulled]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def start(self, ticket: KVTicket, run: Callable[[Pull], Pulled]) -> None:
        """Have `run` called on a worker. What it raises becomes a `PullFailed`."""
        if self._closed:
            self._outbox.put(PullFailed(ticket.ticket_id, "unreachable", CLOSED))
            return
        pull = Pull(ticket)
        with self._lock:
            future = self._workers.submit(self._run, pull, run, self._clock() + self._timeout_s)
            self._open[pull] = future
        future.add_done_callback(lambda done: self._finish(pull, done))

    def cancel(self, ticket_id: str) -> KVTicket | None:
        """End the pulls of a ticket; returns that ticket, or None when there are none."""
        with self._lock:
            found = [(pull, future) for pull, future in self._open.items() if pull.ticket.ticket_id == ticket_id]
        for pull, future in found:
            pull.end(PullError("cancelled", "the pull was given up"))
            future.cancel()
        return found[0][0].ticket if found else None

    def close(self) -> None:
        """End all pulls, those that wait for a worker too, and wait for their threads."""
        self._closed = True
        with self._lock:
            pulls = list(self._open)
        for pull in pulls:
            pull.end(PullError("unreachable", CLOSED))
        self._workers.shutdown(wait=True, cancel_futures=True)

    def _run(self, pull: Pull, run: Callable[[Pull], Pulled], start_by_s: float) -> Pulled:
        if self._clock() >= start_by_s:
            raise TimeoutError
        return run(pull)

    def _finish(self, pull: Pull, done: Future[Pulled]) -> None:
        with self._lock:
            del self._open[pull]
        self._outbox.put(outcome(pull, done))


CLOSED = "this engine's connector is closed"


def outcome(pull: Pull, done: Future[Pulled]) -> Pulled | PullFailed:
    """The one event of a pull that ended: what it returned, or its error as a cause."""
    ticket_id = pull.ticket.ticket_id
    error = pull.reason if done.cancelled() else done.exception()
    match error:
        case None:
            return done.result()
        case PullError() | OSError() if pull.reason is not None:
            return PullFailed(ticket_id, pull.reason.cause, pull.reason.message)
        case PullError():
            return PullFailed(ticket_id, error.cause, error.message)
        case TimeoutError():
            return PullFailed(ticket_id, "timeout", "the producer did not answer in time")
        case OSError():
            return PullFailed(ticket_id, "unreachable", f"the producer cannot be reached: {error}")
        case msgspec.DecodeError():
            return PullFailed(ticket_id, "protocol", f"the producer sent something else than an answer: {error}")
    logger.error("pull of ticket %s broke", ticket_id, exc_info=error)
    return PullFailed(ticket_id, "internal", "the pull broke; see the engine's log")
