"""A few hundred seeded storms; `make test-faults` plays thousands."""

from __future__ import annotations

import re

import pytest

from faults.run import replay_command
from faults.storm import run_storm

NUM_GROUPS, NUM_SEEDS = 40, 5


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_everything_holds_in_a_storm(group: int) -> None:
    for seed in range(group * NUM_SEEDS, (group + 1) * NUM_SEEDS):
        report = run_storm(seed)
        assert report.failure is None, f"seed {seed}: {report.failure}; again with: {replay_command(seed)}"


def test_a_seed_is_one_run() -> None:
    first, second = run_storm(3), run_storm(3)
    assert without_ids(first.log) == without_ids(second.log)
    assert first.num_requests and first.num_transfers


def without_ids(log: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Epochs and ticket ids are random in every run, and decide nothing."""
    return [(at_s, re.sub(r"[0-9a-f]{8,}|epoch \w+", "#", text)) for at_s, text in log]
