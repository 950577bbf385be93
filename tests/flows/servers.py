"""Servers as a user starts them: processes of the command line, watched through their output, ended by signal."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0

LISTENING = r"listening on (http://127\.0\.0\.1:\d+)"

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


class Server:
    """A `fourhop` process. `url` is where it listens; `output` all that it printed so far."""

    def __init__(self, *arguments: str) -> None:
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (closed by `stop`)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fourhop", *arguments],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

    @property
    def output(self) -> str:
        return os.pread(self._log.fileno(), 10_000_000, 0).decode(errors="replace")

    def wait_for(self, pattern: str, count: int = 1) -> list[str]:
        """Until the output has `count` matches of `pattern`; returns them."""
        stop = threading.Event()
        deadline = threading.Timer(START_TIMEOUT_S, stop.set)
        deadline.start()
        try:
            while len(found := re.findall(pattern, self.output)) < count:
                if stop.wait(0.05) or self.process.poll() is not None:
                    raise AssertionError(f"no {pattern!r} in:\n{self.output[-4000:]}")
            return found
        finally:
            deadline.cancel()

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """End it as a user does, and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self._log.close()


@contextlib.contextmanager
def running(*commands: tuple[str, ...], ready: str = LISTENING) -> Iterator[list[Server]]:
    """Servers that are up, started together and ended with Ctrl-C. `ready` is a pattern in the output of each."""
    servers = [Server(*command) for command in commands]
    try:
        for server in servers:
            server.wait_for(ready)
        yield servers
    finally:
        ends = [(server.output, server.stop()) for server in reversed(servers)]
    for output, status in ends:
        assert status in (0, 130), f"exit status {status}:\n{output[-4000:]}"


def url_of(server: Server) -> str:
    """Where a server listens."""
    return server.wait_for(LISTENING)[0]
