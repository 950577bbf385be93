"""Starting and ending the processes of a set-up."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fourhop.bench.setups import Command, Setup
from fourhop.tokens.connection import Session, Timeouts, call
from fourhop.up import child as child_program
from fourhop.wire.errors import FourhopError, StartError

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.1
PATIENCE = Timeouts(connect_s=1.0, first_byte_s=5.0, idle_s=5.0)
LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:\d+)")
ROW = re.compile(r"^  (\S+) +(http://127\.0\.0\.1:\d+) +pid \d+", re.MULTILINE)


@dataclass(frozen=True)
class Site:
    """Where a running set-up is asked, and where its engines tell their metrics."""

    url: str
    metrics_urls: tuple[str, ...]


@asynccontextmanager
async def running(setup: Setup, session: Session, folder: Path) -> AsyncIterator[Site]:
    """The set-up, ready to be asked, its output in `folder`. Ends all of it on the way out. Raises StartError."""
    started: list[Process] = []
    try:
        for place, command in enumerate(setup.commands):
            started.append(await Process.start(command, _log(folder, setup, place)))
        for process in started:
            await process.ready(session)
        yield site_of(started[-1].output(), [process.command for process in started])
    finally:
        for process in reversed(started):
            await process.stop()


def _log(folder: Path, setup: Setup, place: int) -> Path:
    """Where the output of a set-up's command goes; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', setup.name)}-{place}.log"


def site_of(output: str, commands: list[Command]) -> Site:
    """The addresses in what a ready `fourhop up` or `fourhop router` has printed."""
    rows = dict(ROW.findall(output))
    if rows:
        url = rows.pop("frontend+router")
        return Site(url, tuple(f"{engine}/metrics" for engine in rows.values()))
    (url,) = LISTENING.findall(output)[:1]
    return Site(url, tuple(f"{command.url}/metrics" for command in commands if command.url))


class Process:
    """One command, its output in a file."""

    def __init__(self, command: Command, log: Path, process: asyncio.subprocess.Process) -> None:
        self.command = command
        self._log = log
        self._process = process

    @classmethod
    async def start(cls, command: Command, log: Path) -> Process:
        """In a session of its own, so that Ctrl-C reaches the benchmark alone; it dies when the benchmark dies."""
        program = [sys.executable, "-m", "fourhop"] if command.argv[0] == "fourhop" else ["/usr/bin/env"]
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
        guard = [sys.executable, "-S", str(child_program.__file__), str(os.getpid()), cores]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *guard,
                *program,
                *command.argv[1:],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(command, log, process)

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    async def ready(self, session: Session) -> None:
        """Raises StartError when it ends first, or takes too long."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not await self._is_ready(session):
            if self._process.returncode is not None:
                raise StartError(f"{self.command} ended: {self._last_line()} (all of it in {self._log})")
            if time.monotonic() > deadline_s:
                raise StartError(f"{self.command} is not ready after {START_TIMEOUT_S:.0f} s (see {self._log})")
            await asyncio.sleep(POLL_S)

    async def _is_ready(self, session: Session) -> bool:
        if self.command.url is None:
            pattern = r"fourhop is ready" if self.command.argv[1] == "up" else LISTENING
            return re.search(pattern, self.output()) is not None
        try:
            async with call(session, "GET", f"{self.command.url}/health", timeouts=PATIENCE):
                return True
        except FourhopError:
            return False

    async def stop(self) -> None:
        """As a user ends it, and if that does not do, by force."""
        for number in (signal.SIGINT, signal.SIGKILL):
            if self._process.returncode is not None:
                return
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()

    def _last_line(self) -> str:
        lines = self.output().strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"
