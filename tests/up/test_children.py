"""Engine processes under `up`: real processes of a small program."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

import fakes.engine_process
from fourhop.service import ServerConfig, bind
from fourhop.up import child as child_program
from fourhop.up.children import Children, describe
from fourhop.up.plan import EnginePlan
from fourhop.wire.errors import StartError


class Told:
    """Events, kept."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.ready_names: list[str] = []
        self.changed = asyncio.Event()

    def line(self, name: str, text: str) -> None:
        self.lines.append((name, text))
        self.changed.set()

    def ready(self, name: str) -> None:
        self.ready_names.append(name)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


def free_port() -> int:
    with bind(ServerConfig(port=0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def launched(port: int, folder: Path) -> list[str]:
    core = min(os.sched_getaffinity(0))
    engine = [sys.executable, "-S", fakes.engine_process.__file__, str(port), str(folder)]
    return [sys.executable, "-S", child_program.__file__, str(os.getpid()), str(core), *engine]


def run(folder: Path, scenario: Callable[[Children, Told], Coroutine[None, None, None]]) -> Told:
    """One engine with its files in `folder`, for as long as the scenario runs."""

    async def main() -> Told:
        told = Told()
        port = free_port()
        plan = EnginePlan("decode-0", "decode", f"http://127.0.0.1:{port}", (0,), ())
        async with Children([plan], lambda plan: launched(port, folder), told, stop_timeout_s=1.0) as children:
            await scenario(children, told)
        return told

    return asyncio.run(main())


def pid_of(folder: Path, start: int = 0) -> int:
    return int((folder / f"pid-{start}").read_text().split()[0])


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_an_engine_is_pinned_made_ready_and_stopped(tmp_path: Path) -> None:
    async def scenario(children: Children, told: Told) -> None:
        await children.ready()
        assert told.ready_names == ["decode-0"]
        assert children.pids() == {"decode-0": pid_of(tmp_path)}
        assert (tmp_path / "pid-0").read_text().endswith(f"[{min(os.sched_getaffinity(0))}]")

    told = run(tmp_path, scenario)
    assert not is_alive(pid_of(tmp_path))
    assert ("decode-0", "up") in told.lines


def test_an_engine_that_cannot_start_is_reported_with_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()

    async def scenario(children: Children, told: Told) -> None:
        with pytest.raises(StartError, match=r"^engine decode-0 did not start: no weights here \(exit status 3\)$"):
            await children.ready()

    run(tmp_path, scenario)


def test_an_engine_that_dies_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(children: Children, told: Told) -> None:
        await children.ready()
        os.kill(pid_of(tmp_path), signal.SIGKILL)
        await told.until(lambda: told.lines.count(("decode-0", "up")) == 2)
        assert children.pids() == {"decode-0": pid_of(tmp_path, 1)}

    run(tmp_path, scenario)
    assert 'engine_died engine=decode-0 end="killed by SIGKILL" restart_in_s=0.5000' in caplog.text
    assert "engine_last_line engine=decode-0 line=up" in caplog.text
    assert not is_alive(pid_of(tmp_path, 1))


def test_what_an_engine_started_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "forks").touch()

    async def scenario(children: Children, told: Told) -> None:
        await children.ready()
        os.kill(pid_of(tmp_path), signal.SIGKILL)
        await told.until(lambda: told.lines.count(("decode-0", "up")) == 2)
        assert not is_alive(int((tmp_path / "forked-0").read_text()))

    run(tmp_path, scenario)
    wait_for(lambda: not is_alive(int((tmp_path / "forked-1").read_text())))


def test_stopping_does_not_wait_for_a_pause_to_end(tmp_path: Path) -> None:
    async def scenario(children: Children, told: Told) -> None:
        await children.ready()
        os.kill(pid_of(tmp_path), signal.SIGKILL)
        await asyncio.to_thread(wait_for, lambda: not children.pids())

    run(tmp_path, scenario)
    assert not (tmp_path / "pid-1").exists()


def test_an_engine_that_ignores_the_signal_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "deaf").touch()

    async def scenario(children: Children, told: Told) -> None:
        await children.ready()

    run(tmp_path, scenario)
    assert "engine_killed engine=decode-0" in caplog.text
    assert not is_alive(pid_of(tmp_path))


def test_engines_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys, time\n"
        "child, engine, folder, port = sys.argv[1:]\n"
        "command = [sys.executable, '-S', child, str(os.getpid()), '0', sys.executable, '-S', engine, port, folder]\n"
        "command[4] = str(min(os.sched_getaffinity(0)))\n"
        "subprocess.Popen(command, start_new_session=True)\n"
        "time.sleep(60)\n"
    )
    arguments = [child_program.__file__, fakes.engine_process.__file__, str(tmp_path), str(free_port())]
    with subprocess.Popen([sys.executable, "-S", "-c", program, *arguments]) as parent:
        wait_for(lambda: (tmp_path / "pid-0").exists())
        parent.kill()
    wait_for(lambda: not is_alive(pid_of(tmp_path)))


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll another process's doing; the test's own timeout is the limit."""
    while not condition():
        time.sleep(0.005)


def test_an_exit_status_is_said_in_words() -> None:
    assert (describe(1), describe(-9), describe(0)) == ("exit status 1", "killed by SIGKILL", "exit status 0")
