"""The README's first screen, executed: its commands, its answers, and Ctrl-C at the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fourhop.service import ServerConfig, bind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def first_screen() -> list[tuple[str, str]]:
    """The README's blocks of code before its first heading of the second level, with their languages."""
    text, _, _ = (ROOT / "README.md").read_text().partition("\n## ")
    return FENCE.findall(text)


@dataclass(frozen=True)
class Up:
    """A pipeline that `make up` started. `output` is what it has printed."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int

    @property
    def output(self) -> str:
        return self.log.read_text()

    def pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r" pid (\d+)", self.output)]

    def adapted(self, code: str) -> str:
        """A command or program of the README, for the port that this test uses."""
        return code.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    ((language, command), *_) = first_screen()
    assert (language, command) == ("console", "make up\n")
    with bind(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
    log = tmp_path_factory.mktemp("up") / "log"
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            ["make", "up", f"ARGS=--port {port}"],
            cwd=ROOT,
            env=plain,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        started = Up(process, log, port)
        try:
            until(lambda: "fourhop is ready" in started.output or process.poll() is not None)
            assert process.poll() is None, started.output
            yield started
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)


def until(condition: Any) -> None:
    """Poll other processes; the test's timeout is the limit."""
    while not condition():
        time.sleep(0.05)


def test_the_curl_line_gets_the_answer_that_is_shown(up: Up) -> None:
    (curl,) = [code for language, code in first_screen() if language == "console" and code.startswith("curl")]
    (shown,) = [code for language, code in first_screen() if language == "json"]
    done = subprocess.run(["sh", "-c", up.adapted(curl)], capture_output=True, check=True)
    assert without_identity(done.stdout) == without_identity(shown.encode())


def without_identity(answer: bytes) -> dict[str, Any]:
    body = msgspec.json.decode(answer, type=dict[str, Any])
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 0
    return body


def test_the_line_that_up_prints_is_that_of_the_readme(up: Up) -> None:
    (curl,) = [code for language, code in first_screen() if language == "console" and code.startswith("curl")]
    assert up.adapted(curl).replace("curl -s", "curl").strip() in up.output


def test_the_python_program_prints_what_is_shown(up: Up) -> None:
    (program,) = [code for language, code in first_screen() if language == "python"]
    (shown,) = [code for language, code in first_screen() if language == "text"]
    done = subprocess.run([sys.executable, "-c", up.adapted(program)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == shown.strip()


def test_prefill_and_decode_were_different_engines(up: Up) -> None:
    lines = [line for line in up.output.splitlines() if " fourhop.request request " in line]
    assert lines
    for line in lines:
        fields = dict(re.findall(r"(\w+)=(\S+)", line))
        assert fields["outcome"] == "finished"
        assert fields["prefill"] != fields["decode"]


def test_ctrl_c_leaves_nothing_running(up: Up) -> None:
    pids = up.pids()
    assert len(pids) == 3
    os.killpg(up.process.pid, signal.SIGINT)
    up.process.wait()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert "Traceback" not in up.output
