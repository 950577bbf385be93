"""`fourhop up` as a user sees it: where its parts listen, their process ids, and what is left of it at the end."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from flows.servers import Server

ROW = r"^  (\S+) +(http://127\.0\.0\.1:\d+) +pid (\d+)"


@dataclass(frozen=True)
class Pipeline:
    """A running `fourhop up`. `urls` has its engines by name, `pids` all its processes."""

    server: Server
    url: str
    urls: dict[str, str]
    pids: dict[str, int]

    def pid_of(self, engine: str) -> int:
        """The process that is this engine at the moment, which differs from `pids` after it was started again."""
        port = self.urls[engine].rpartition(":")[2]
        (pid,) = [pid for pid in children_of(self.server.process.pid) if f"--port {port} " in command_of(pid)]
        return pid


@contextlib.contextmanager
def up(*arguments: str) -> Iterator[Pipeline]:
    """`fourhop up` on a free port, ended with Ctrl-C: afterwards its status is 0 and none of its processes is left."""
    server = Server("up", *arguments, "--port", "0")
    pids: list[int] = []
    try:
        server.wait_for("fourhop is ready")
        rows = re.findall(ROW, server.output, re.MULTILINE)
        where = {name: url for name, url, _ in rows}
        yield Pipeline(server, where.pop("frontend+router"), where, {name: int(pid) for name, _, pid in rows})
        pids = children_of(server.process.pid)
    finally:
        output, status = server.output, server.stop()
    assert status == 0, f"exit status {status}:\n{output[-4000:]}"
    assert not [pid for pid in pids if is_alive(pid)]
    assert "Traceback" not in output, output[-8000:]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def is_alive(pid: int) -> bool:
    """True if the process runs; one that ended but was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def metric(url: str, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    values = [line.rpartition(" ")[2] for line in lines if re.match(rf"{name}(\{{| )", line)]
    assert values, f"{url} has no metric {name}"
    return sum(float(value) for value in values)


def until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Poll other processes until `condition` holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s"
        time.sleep(0.05)
