"""Set-ups as processes: ready before they are asked, gone afterwards, and a reason if one will not start."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from fourhop.bench.launch import running
from fourhop.bench.setups import Command, Setup
from fourhop.tokens.connection import open_session
from fourhop.wire.errors import StartError

pytestmark = pytest.mark.slow

SERVER = """
import os, signal
print("pid", os.getpid())
print("listening on http://127.0.0.1:4", flush=True)
signal.pause()
"""
PORT_TAKEN = "import sys; print('starting'); sys.exit('port 4 is in use')"


def setup(*programs: str) -> Setup:
    return Setup("a (b)", "other", tuple(Command(("env", sys.executable, "-c", program)) for program in programs))


def pids_in(folder: Path) -> list[int]:
    return [int(log.read_text().split()[1]) for log in sorted(folder.iterdir())]


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def start(what: Setup, folder: Path) -> tuple[str, list[int]]:
    """The address of a set-up, and the processes that ran while it could be asked."""

    async def work() -> tuple[str, list[int]]:
        async with open_session() as session, running(what, session, folder) as site:
            pids = pids_in(folder)
            assert all(is_there(pid) for pid in pids)
            return site.url, pids

    return asyncio.run(work())


def test_a_setup_is_asked_at_its_last_process_and_leaves_none(tmp_path: Path) -> None:
    url, pids = start(setup(SERVER.replace(":4", ":3"), SERVER), tmp_path / "logs")
    assert url == "http://127.0.0.1:4"
    assert len(pids) == 2
    assert not any(is_there(pid) for pid in pids)


def test_a_setup_of_a_parent_that_ignores_ctrl_c_is_ended_too(tmp_path: Path) -> None:
    """As where a shell script runs the benchmark in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _, pids = start(setup(SERVER), tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not any(is_there(pid) for pid in pids)


def test_what_will_not_start_says_why_and_the_others_are_ended(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="port 4 is in use"):
        start(setup(SERVER, PORT_TAKEN), tmp_path)
    assert not is_there(int((tmp_path / "a-b--0.log").read_text().split()[1]))
