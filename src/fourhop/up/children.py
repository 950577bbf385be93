"""The engine processes of `fourhop up`: started, watched, started again, stopped.

async with Children(plans, command, events, stop_timeout_s=...) as children:
    await children.ready()      every engine answers /health with 200, or StartError
    ...                         an engine that dies is reported, and started again after a pause
                                on the way out: SIGTERM to all, wait with a deadline, SIGKILL by pid
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import aiohttp

from fourhop.service.logs import event
from fourhop.service.progress import percent_of
from fourhop.up import child as child_program
from fourhop.up.plan import EnginePlan, backoff_s
from fourhop.wire.errors import StartError

log = logging.getLogger(__name__)

POLL_S = 0.1
STEADY_S = 60.0
"""An engine that ran this long has recovered: the next pause before a start is the shortest again."""
NUM_LAST_LINES = 5
MAX_LINE_BYTES = 1 << 16


class Events(Protocol):
    """What is told while engines run."""

    def line(self, name: str, text: str) -> None:
        """An engine wrote a line."""

    def ready(self, name: str) -> None:
        """An engine answers for the first time."""


class Children:
    """All engines. `stop_timeout_s` is how long they may take to end after SIGTERM."""

    def __init__(
        self,
        plans: Iterable[EnginePlan],
        command: Callable[[EnginePlan], list[str]],
        events: Events,
        *,
        stop_timeout_s: float,
    ) -> None:
        self._children = [Child(plan, command(plan), events) for plan in plans]
        self._stop_timeout_s = stop_timeout_s

    async def __aenter__(self) -> Children:
        for child in self._children:
            child.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.gather(*(child.stop(self._stop_timeout_s) for child in self._children))

    async def ready(self) -> None:
        """Wait for every engine. Raises StartError when one ends before it was ready."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            waiting = [asyncio.create_task(child.ready(session)) for child in self._children]
            try:
                await asyncio.gather(*waiting)
            finally:
                for task in waiting:
                    task.cancel()

    def pids(self) -> dict[str, int]:
        """The process ids of the engines that run, by name."""
        return {child.plan.name: child.pid for child in self._children if child.pid is not None}


class Child:
    """One engine: its process, and after a death the process that replaces it."""

    def __init__(self, plan: EnginePlan, command: list[str], events: Events) -> None:
        self.plan = plan
        self._command = command
        self._events = events
        self._process: asyncio.subprocess.Process | None = None
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._was_ready = False
        self._stop = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    def start(self) -> None:
        self._watch = asyncio.create_task(self._keep_running())

    async def ready(self, session: aiohttp.ClientSession) -> None:
        """Poll /health until it is 200. Raises StartError when the process ends first."""
        assert self._watch is not None
        while not await _is_healthy(session, self.plan.url):
            if self._watch.done():
                raise StartError(f"engine {self.plan.name} did not start: {self._last_words()}")
            await asyncio.sleep(POLL_S)
        self._was_ready = True
        self._events.ready(self.plan.name)

    async def stop(self, timeout_s: float) -> None:
        """End the process and wait until it is gone."""
        self._stop.set()
        self._signal(signal.SIGTERM)
        assert self._watch is not None
        _, late = await asyncio.wait([self._watch], timeout=timeout_s)
        if late:
            log.error(event("engine_killed", engine=self.plan.name, waited_s=timeout_s))
            self._kill_session()
        await self._watch

    async def _keep_running(self) -> None:
        """Run, report the end, run again; an engine that never was ready is not run again."""
        loop = asyncio.get_running_loop()
        num_failures = 0
        while not self._stop.is_set():
            started_s = loop.time()
            status = await self._run()
            if self._stop.is_set() or not self._was_ready:
                return
            num_failures = 1 if loop.time() - started_s > STEADY_S else num_failures + 1
            pause_s = backoff_s(num_failures)
            log.error(event("engine_died", engine=self.plan.name, end=describe(status), restart_in_s=pause_s))
            for line in self._last_lines:
                log.error(event("engine_last_line", engine=self.plan.name, line=line))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_s)

    async def _run(self) -> int:
        self._last_lines.clear()
        # A session of its own: Ctrl-C reaches `up` alone, which stops the engines in its order.
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **self.plan.environment},
        )
        if self._stop.is_set():
            self._signal(signal.SIGTERM)
        assert self._process.stdout is not None
        reader = asyncio.create_task(self._read(self._process.stdout))
        await _ended(self._process.pid)
        self._kill_session()  # what it started and left behind keeps its output open, and its ports
        await reader
        return await self._process.wait()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            if percent_of(line) is None:
                self._last_lines.append(line)
            self._events.line(self.plan.name, line)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _kill_session(self) -> None:
        """End the process and those that it started, which are in its session, whether or not it is still there."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        last = self._last_lines[-1] if self._last_lines else "it wrote nothing"
        assert self._process is not None and self._process.returncode is not None
        return f"{last} ({describe(self._process.returncode)})"


def engine_command(plan: EnginePlan, parent_pid: int) -> list[str]:
    """The process behind a plan: the user's command line, pinned, and gone when `parent_pid` is gone."""
    cores = ",".join(str(core) for core in plan.cores)
    program = str(Path(child_program.__file__))
    return [sys.executable, "-S", program, str(parent_pid), cores, *plan.command]


def describe(status: int) -> str:
    """An exit status as people say it: `exit status 1`, `killed by SIGKILL`."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


async def _ended(pid: int) -> None:
    """Until a process has ended. `Process.wait` also waits for whoever else has its output."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines as they come, without a limit to trip over: a longer one is cut into pieces."""
    rest = b""
    while chunk := await stream.read(MAX_LINE_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").rstrip()
        if len(rest) > MAX_LINE_BYTES:
            yield rest.decode(errors="replace")
            rest = b""
    if rest:
        yield rest.decode(errors="replace")


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
