"""The part of the contract that is about blocks of the producer, held by every connector but the store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from contracts.holding import *  # noqa: F403
from contracts.progress import early as early
from fakes.kv_world import World, local_world, world_of


@pytest.fixture(params=["local", "shm", "tcp", "nixl"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    opened = local_world() if request.param == "local" else world_of(request.param)
    yield opened
    opened.close()
