"""The connector contract, held by every connector."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from contracts.connector import *  # noqa: F403
from contracts.progress import *  # noqa: F403
from fakes.kv_world import World, world_of
from fourhop.kv.config import ConnectorOptions
from fourhop.kv.connector import Connector, Notify
from fourhop.kv.connectors import CONNECTORS
from fourhop.kv.layout import KVPool
from fourhop.kv.local import LocalConnector, LocalNetwork
from fourhop.kv.pulls import Conduct


def local_world() -> World:
    network = LocalNetwork()

    def open_local(options: ConnectorOptions, pool: KVPool, epoch: str, notify: Notify, conduct: Conduct) -> Connector:
        return LocalConnector(network, options, pool, epoch, notify, conduct=conduct)

    return World(open_local)


@pytest.fixture(params=["local", *CONNECTORS])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    opened = local_world() if request.param == "local" else world_of(request.param)
    yield opened
    opened.close()
