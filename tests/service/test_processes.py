"""Several processes behind one port: real ones, of a small program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fakes.worker_processes


@contextmanager
def processes(folder: Path, count: int = 2) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, fakes.worker_processes.__file__, str(folder), str(count)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as parent:
        try:
            yield parent
        finally:
            parent.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll other processes' doing; the test's own timeout is the limit."""
    while not condition():
        time.sleep(0.005)


def pids(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")}


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_process_once(tmp_path: Path, number: signal.Signals) -> None:
    with processes(tmp_path, 3) as parent:
        wait_for(lambda: len(pids(tmp_path)) == 3)
        parent.send_signal(number)
        assert parent.wait() == 0
    assert not any(map(is_alive, pids(tmp_path)))
    assert [path.read_text() for path in tmp_path.glob("end-*")] == [number.name] * 3


def test_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    with processes(tmp_path) as parent:
        wait_for(lambda: len(pids(tmp_path)) == 2)
        killed = min(pids(tmp_path))
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: len(pids(tmp_path)) == 3)
        parent.send_signal(signal.SIGINT)
        assert parent.stderr is not None
        assert f'worker_died pid={killed} end="killed by SIGKILL"' in parent.stderr.read()
        assert parent.wait() == 0
    assert not any(map(is_alive, pids(tmp_path)))


def test_one_that_cannot_start_again_for_a_while_leaves_the_others_alone(tmp_path: Path) -> None:
    """What a start needs (a file, a package) may be missing for a moment, hours after the first one."""
    with processes(tmp_path) as parent:
        wait_for(lambda: len(pids(tmp_path)) == 2)
        (tmp_path / "refused").touch()
        killed, other = sorted(pids(tmp_path))
        os.kill(killed, signal.SIGKILL)
        assert parent.stderr is not None
        lines = [parent.stderr.readline(), parent.stderr.readline()]
        assert 'why="no vocabulary here"' in lines[1] and is_alive(other)
        (tmp_path / "refused").unlink()
        wait_for(lambda: len(pids(tmp_path)) == 3)
        parent.send_signal(signal.SIGINT)
        assert parent.wait() == 0


def test_what_hinders_a_start_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "refused").touch()
    with processes(tmp_path, 4) as parent:
        assert parent.stderr is not None
        assert parent.stderr.read() == "one line: no vocabulary here\n"
        assert parent.wait() == 1


def test_a_process_that_ends_at_its_start_ends_all(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with processes(tmp_path) as parent:
        assert parent.stderr is not None
        assert parent.stderr.read() == "one line: a worker process ended at its start, exit status 7\n"
        assert parent.wait() == 1


def test_processes_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with processes(tmp_path) as parent:
        wait_for(lambda: len(pids(tmp_path)) == 2)
        parent.kill()
        wait_for(lambda: not any(map(is_alive, pids(tmp_path))))
