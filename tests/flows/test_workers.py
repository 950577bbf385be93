"""`fourhop frontend --workers`: one port, several processes, none left behind."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from fakes.toy import write_toy_checkpoint
from flows.servers import LISTENING, running, url_of

pytestmark = pytest.mark.slow


def test_workers_share_a_port_and_one_that_dies_is_replaced(tmp_path: Path) -> None:
    model = str(write_toy_checkpoint(tmp_path))
    with running(("frontend", model, "--port", "0", "--workers", "2")) as [server]:
        assert len(set(server.wait_for(LISTENING, 2))) == 1
        url = url_of(server)
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        killed = int(children.read_text().split()[0])
        os.kill(killed, signal.SIGKILL)
        server.wait_for(LISTENING, 3)
        assert re.search(rf"worker_died pid={killed}", server.output)
        workers = [int(pid) for pid in children.read_text().split()]
        assert len(workers) == 2 and killed not in workers
        for _ in range(8):
            answer = httpx.post(f"{url}/tokenize", json={"prompt": "hi"}, timeout=60)
            assert answer.json()["tokens"] == [104, 105]
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_routers_are_one_to_an_operator_and_drain_together(tmp_path: Path) -> None:
    engines = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")
    with running(("router", "--port", "0", "--workers", "2", *engines)) as [server]:
        server.wait_for(LISTENING, 2)
        url = url_of(server)
        drained = httpx.post(f"{url}/router/drain", json={"worker": "http://127.0.0.1:2"}, timeout=60)
        assert drained.json()["draining"] is True
        drains = [
            f'fourhop_router_draining{{worker="{worker}",engine="http://127.0.0.1:2",role="decode"}} 1.0'
            for worker in (0, 1)
        ]
        told = httpx.get(f"{url}/metrics", timeout=60).text
        assert all(line in told for line in drains)
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
        server.wait_for(LISTENING, 3)
        told = httpx.get(f"{url}/metrics", timeout=60).text
        assert all(line in told for line in drains)
