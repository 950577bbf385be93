"""Real processes of a fleet that are killed at any moment and start again at the same addresses."""

from __future__ import annotations

import asyncio

import pytest

from faults.kills import NUM_REQUESTS, play_all

NUM_KILLS = 8

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize("connector", ["shm", "tcp"])
def test_killed_processes(connector: str) -> None:
    """Whoever is killed when: every request ends with its tokens or an error, and the next ones are split again."""
    tally = asyncio.run(play_all(connector, NUM_KILLS, 3))
    assert sum(tally.kills.values()) == NUM_KILLS
    assert len(tally.kills) >= 3, "several were killed"
    assert tally.errors < tally.streams == NUM_KILLS * NUM_REQUESTS, "most requests are served by others"
