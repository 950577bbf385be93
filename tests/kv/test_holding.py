"""The part of the contract that is about blocks of the producer, held by every connector but the store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from contracts.holding import *  # noqa: F403
from contracts.progress import early as early
from fakes.kv_world import World, local_world, multi_world, world_of


@pytest.fixture(params=["local", "shm", "tcp", "nixl", "multi"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    match request.param:
        case "local":
            opened = local_world()
        case "multi":
            opened = multi_world()
        case name:
            opened = world_of(name)
    yield opened
    opened.close()
