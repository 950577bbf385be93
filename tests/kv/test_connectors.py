"""The connector contract, held by every connector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.connector import *  # noqa: F403
from contracts.progress import *  # noqa: F403
from fakes.kv_world import World, local_world, multi_world, world_of
from fourhop.kv.connectors import CONNECTORS


@pytest.fixture(params=["local", *CONNECTORS])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    match request.param:
        case "local":
            opened = local_world()
        case "store":
            opened = world_of("store", url=str(tmp_path))
        case "multi":
            opened = multi_world()
        case name:
            opened = world_of(name)
    yield opened
    opened.close()
