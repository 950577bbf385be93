"""Notes to producers: a message on a connection of its own, best effort, without an answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from fourhop.kv.connector import PullError
from fourhop.kv.control import Decline, Renew
from fourhop.wire.ticket import KVTicket

logger = logging.getLogger(__name__)

NUM_WORKERS = 4
"""Threads of their own, so that no note waits behind a pull."""

Note = Renew | Decline


class Notes:
    """Sends notes on worker threads. A note that is still on its way is not sent again; a lost one is counted."""

    def __init__(self, send: Callable[[KVTicket, Note], None]) -> None:
        self.num_lost = 0
        self._send = send
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="kv-note")
        self._under_way: set[Note] = set()
        self._lock = threading.Lock()
        self._closed = False

    def post(self, ticket: KVTicket, note: Note) -> None:
        with self._lock:
            if self._closed or note in self._under_way:
                return
            self._under_way.add(note)
        future = self._workers.submit(self._send, ticket, note)
        future.add_done_callback(lambda done: self._finish(note, done))

    def close(self) -> None:
        """Drop the notes that wait, and wait for those under way."""
        self._closed = True
        self._workers.shutdown(wait=True, cancel_futures=True)

    def _finish(self, note: Note, done: Future[None]) -> None:
        with self._lock:
            self._under_way.discard(note)
        if done.cancelled():
            return
        match done.exception():
            case None:
                return
            case PullError() | OSError() as error:
                self.num_lost += 1
                logger.debug("%s of KV ticket %s was lost: %s", type(note).__name__, note.ticket_id, error)
            case error:
                logger.error("%s of KV ticket %s broke", type(note).__name__, note.ticket_id, exc_info=error)
