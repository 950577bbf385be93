"""Two real processes: a child that holds blocks, and this one, which pulls them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import pytest

from fakes.kv_world import LAYOUT, Party, World, num_bytes, pattern, world_of
from fourhop.kv.connector import Pulled
from fourhop.kv.pulls import Conduct
from fourhop.wire.ticket import KVTicket

PRODUCER = Path(__file__).parents[1] / "fakes" / "kv_producer.py"

pytestmark = pytest.mark.slow


class Child:
    """A producing process with `num_tickets` tickets."""

    def __init__(self, connector: str, num_tickets: int) -> None:
        command = [sys.executable, str(PRODUCER), connector, str(num_tickets)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.tickets = [msgspec.json.decode(self._line(), type=KVTicket) for _ in range(num_tickets)]

    def taken(self) -> str:
        """The id of the next ticket that the child saw taken."""
        stdin = self._pipe(self._process.stdin)
        stdin.write("next\n")
        stdin.flush()
        return self._line().strip()

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def wait(self) -> int:
        """Let the child end, if it has not."""
        with self._process:
            self._pipe(self._process.stdin).close()
        return self._process.returncode

    def _line(self) -> str:
        return self._pipe(self._process.stdout).readline()

    def _pipe(self, pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


@pytest.fixture(params=["shm", "tcp", "nixl"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    opened = world_of(request.param)
    yield opened
    opened.close()


@pytest.fixture
def consumer(world: World) -> Party:
    return world.party("this process")


@pytest.fixture
def child(consumer: Party) -> Iterator[Child]:
    started = Child(consumer.connector.name, 3)
    yield started
    started.kill()


def pull_ok(consumer: Party, ticket: KVTicket) -> None:
    consumer.connector.pull(ticket, [9, 4], [])
    assert consumer.next_event() == Pulled(ticket.ticket_id, num_bytes(2))
    expected = pattern(LAYOUT, salt=1)[:, ticket.block_ids[0]]
    assert np.array_equal(consumer.pool.planes[:, [9, 4]], expected)


def mapped_pools() -> set[str]:
    """The inodes of all pools that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "fourhop-kv" in line}


def test_blocks_come_from_another_process(consumer: Party, child: Child) -> None:
    pull_ok(consumer, child.tickets[2])
    pull_ok(consumer, child.tickets[0])
    assert [child.taken(), child.taken()] == ["t2", "t0"]
    assert child.wait() == 0


def test_killed_producer_is_unreachable_and_its_memory_goes(consumer: Party, child: Child) -> None:
    own = mapped_pools()
    pull_ok(consumer, child.tickets[0])
    foreign = mapped_pools() - own
    assert len(foreign) == (1 if consumer.connector.name == "shm" else 0)
    child.kill()
    consumer.connector.pull(child.tickets[1], [9, 4], [])
    assert consumer.failure() == "unreachable"
    assert not mapped_pools() & foreign


def test_producer_killed_during_the_pull_is_unreachable(world: World) -> None:
    def kill(step: str, ticket_id: str) -> None:
        if step == "claimed":
            victim.kill()

    consumer = world.party("this process", conduct=Conduct(on_step=kill))
    victim = Child(consumer.connector.name, 1)
    consumer.connector.pull(victim.tickets[0], [9, 4], [])
    assert consumer.failure() == "unreachable"
