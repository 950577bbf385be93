"""Notes to producers: sent once, lost without harm."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fakes.kv_world import WAIT_S, make_ticket
from fourhop.kv.connector import PullError
from fourhop.kv.control import Decline, Renew
from fourhop.kv.notes import Note, Notes
from fourhop.wire.ticket import KVTicket

TICKET = make_ticket("t", [1], "epoch-1")
RENEW, DECLINE = Renew("t", "epoch-1"), Decline("t", "epoch-1")


class Post:
    """Takes notes; holds each until `go_on`, and raises `error` if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.taken: list[Note] = []
        self._error = error
        self._arrived = threading.Semaphore(0)
        self._go_on = threading.Semaphore(0)
        self.notes = Notes(self._send)

    def arrived(self) -> None:
        assert self._arrived.acquire(timeout=WAIT_S)

    def close(self) -> None:
        self._go_on.release(99)
        self.notes.close()

    def _send(self, ticket: KVTicket, note: Note) -> None:
        self.taken.append(note)
        self._arrived.release()
        assert self._go_on.acquire(timeout=WAIT_S)
        if self._error is not None:
            raise self._error


@pytest.fixture
def post() -> Iterator[Post]:
    opened = Post()
    yield opened
    opened.close()


def test_note_under_way_is_not_sent_again(post: Post) -> None:
    post.notes.post(TICKET, RENEW)
    post.arrived()
    post.notes.post(TICKET, RENEW)
    post.notes.post(TICKET, DECLINE)
    post.arrived()
    post.close()
    assert post.taken == [RENEW, DECLINE]


@pytest.mark.parametrize("error", [PullError("forbidden", "no"), ConnectionRefusedError(), TimeoutError()])
def test_lost_notes_are_counted(error: Exception) -> None:
    post = Post(error)
    post.notes.post(TICKET, RENEW)
    post.arrived()
    post.close()
    assert post.notes.num_lost == 1


def test_bug_in_a_note_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    post = Post(ZeroDivisionError())
    post.notes.post(TICKET, RENEW)
    post.arrived()
    post.close()
    assert "ZeroDivisionError" in caplog.text
    assert post.notes.num_lost == 0


def test_note_after_the_close_is_dropped(post: Post) -> None:
    post.close()
    post.notes.post(TICKET, RENEW)
    assert post.taken == []
