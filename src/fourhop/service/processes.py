"""Several processes behind one port: forked, watched, started again, ended.

They share a listening socket, so the kernel gives each connection to whichever accepts it first. The parent serves
nothing: it waits for signals and for deaths. Fork before the first thread and the first event loop.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from fourhop.service.logs import event
from fourhop.service.siblings import Siblings, open_doors
from fourhop.wire.errors import StartError

log = logging.getLogger(__name__)

Work = Callable[[Siblings | None, Callable[[], None]], None]
"""What a process does, to its end. It is told of the others, if there are others, and calls its second argument as soon
as it serves.
"""

PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
"""Before a process that died is started again: twice as long each time, unless it lived for `STEADY_S`."""
STEADY_S = 60.0
GRACE_S = 5.0
"""Beyond the time that a process needs to drain."""

_STOP = (signal.SIGINT, signal.SIGTERM)
_WATCHED = {*_STOP, signal.SIGCHLD}
_SERVES = b"serves\n"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class ProcessesConfig:
    """Processes of a server.

    Attributes:
        workers: Processes behind the one port. Each has memories, queues and key limits of its own; `/metrics` tells
            of all, with the label `worker`.
    """

    workers: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.workers}")


def run_processes(work: Work, num_processes: int, *, drain_timeout_s: float, shared: tuple[str, ...] = ()) -> None:
    """Run `work` in forked processes until SIGINT or SIGTERM. One that dies after it served is started again.

    `shared` are the beginnings of the paths that are the affair of all (`siblings`).

    A single one is this process itself, watched by nobody. Raises StartError when one could not start; the others are
    ended before. Signals reach the parent alone, which passes each on, so that a second Ctrl-C hurries them.
    """
    if num_processes == 1:
        work(None, lambda: None)
        return
    with open_doors(num_processes) as doors:
        _run(work, [Siblings(number, doors, shared) for number in range(num_processes)], drain_timeout_s)


def _run(work: Work, seats: list[Siblings], drain_timeout_s: float) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    processes = _Processes(work, before)
    try:
        for seat in seats:
            processes.start(seat)
        processes.end(processes.watch(), drain_timeout_s + GRACE_S)
    except StartError:
        processes.end(signal.SIGTERM, drain_timeout_s + GRACE_S)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Processes:
    """All processes by id, each with its seat and the pipe on which it tells that it serves, or why it cannot start."""

    def __init__(self, work: Work, mask: set[signal.Signals | int]) -> None:
        self._work = work
        self._mask = mask
        self._pipes: dict[int, int] = {}
        self._seats: dict[int, Siblings] = {}
        self._began_s: dict[int, float] = {}
        self._num_deaths: dict[int, int] = {}
        self._steady: set[int] = set()
        self._starts: list[tuple[float, Siblings]] = []

    def start(self, seat: Siblings) -> None:
        theirs, ours = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(theirs)
            _live(self._work, seat, ours, parent, self._mask)
        os.close(ours)
        self._pipes[pid], self._seats[pid], self._began_s[pid] = theirs, seat, time.monotonic()

    def watch(self) -> signal.Signals:
        """Until a signal to stop comes; returns it. Raises StartError when one cannot start to begin with: one that
        has served, and cannot start again for the time being, leaves the others alone.
        """
        while True:
            wait_s = min([at_s for at_s, _ in self._starts], default=time.monotonic() + 3600) - time.monotonic()
            got = signal.sigtimedwait(_WATCHED, max(0.0, wait_s))
            if got is not None and got.si_signo in _STOP:
                return signal.Signals(got.si_signo)
            for pid, status, told in self._reap():
                why = "" if told.startswith(_SERVES) else told.decode() or "it ended at its start"
                if not why:
                    self._steady.add(self._seats[pid].number)
                elif self._seats[pid].number not in self._steady:
                    raise StartError(told.decode() or f"a worker process ended at its start, {_end(status)}")
                seat, pause_s = self._bury(pid)
                log.error(event("worker_died", pid=pid, end=_end(status), why=why or None, restart_in_s=pause_s))
                self._starts.append((time.monotonic() + pause_s, seat))
            for start in [start for start in self._starts if start[0] <= time.monotonic()]:
                self._starts.remove(start)
                self.start(start[1])

    def _bury(self, pid: int) -> tuple[Siblings, float]:
        """The seat of a process that ended, and how long it stays empty."""
        seat, lived_s = self._seats.pop(pid), time.monotonic() - self._began_s.pop(pid)
        num_deaths = 1 if lived_s >= STEADY_S else self._num_deaths.get(seat.number, 0) + 1
        self._num_deaths[seat.number] = num_deaths
        return seat, min(MAX_PAUSE_S, PAUSE_S * 2 ** min(num_deaths - 1, 6))

    def end(self, number: signal.Signals, timeout_s: float) -> None:
        """Send the signal, and each that comes meanwhile; SIGKILL after the time. Returns when all are gone."""
        deadline_s = time.monotonic() + timeout_s
        self._send(number)
        while self._pipes:
            got = signal.sigtimedwait(_WATCHED, max(0.0, deadline_s - time.monotonic()))
            if got is None:
                log.error(event("workers_killed", pids=sorted(self._pipes), waited_s=timeout_s))
                self._send(signal.SIGKILL)
                deadline_s = time.monotonic() + timeout_s
            elif got.si_signo in _STOP:
                self._send(signal.Signals(got.si_signo))
            self._reap()

    def _send(self, number: signal.Signals) -> None:
        for pid in self._pipes:
            os.kill(pid, number)

    def _reap(self) -> list[tuple[int, int, bytes]]:
        """Forget the processes that ended; their ids, exit statuses, and what they told."""
        ended = []
        for pid in list(self._pipes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                with os.fdopen(self._pipes.pop(pid), "rb") as pipe:
                    ended.append((pid, os.waitstatus_to_exitcode(status), pipe.read()))
        return ended


def _end(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _live(work: Work, seat: Siblings, pipe: int, parent: int, mask: set[signal.Signals | int]) -> NoReturn:
    """The whole life of a forked process."""

    def serves() -> None:
        os.write(pipe, _SERVES)

    status = 1
    try:
        # A session of its own: Ctrl-C reaches the parent alone. It dies with a parent that is killed.
        os.setsid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if os.getppid() == parent:
            work(seat, serves)
            status = 0
    except StartError as error:
        os.write(pipe, str(error).encode())
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
