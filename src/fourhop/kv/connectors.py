"""Connector names and what they open. A connector's modules are imported when it is chosen."""

from __future__ import annotations

from collections.abc import Callable

from fourhop.kv.config import ConnectorOptions, KVTransferConfig
from fourhop.kv.connector import Connector, Notify
from fourhop.kv.layout import KVPool
from fourhop.kv.pulls import PRODUCTION, Conduct
from fourhop.wire.errors import StartError

Open = Callable[[ConnectorOptions, KVPool, str, Notify, Conduct], Connector]


def open_shm(options: ConnectorOptions, pool: KVPool, epoch: str, notify: Notify, conduct: Conduct) -> Connector:
    from fourhop.kv.peer import PeerConnector
    from fourhop.kv.shm import ShmMover

    return PeerConnector(ShmMover(pool), options, pool, epoch, notify, conduct=conduct)


def open_tcp(options: ConnectorOptions, pool: KVPool, epoch: str, notify: Notify, conduct: Conduct) -> Connector:
    from fourhop.kv.peer import PeerConnector
    from fourhop.kv.tcp import TcpMover

    return PeerConnector(TcpMover(pool), options, pool, epoch, notify, conduct=conduct)


def open_nixl(options: ConnectorOptions, pool: KVPool, epoch: str, notify: Notify, conduct: Conduct) -> Connector:
    from fourhop.kv.nixl import NixlMover
    from fourhop.kv.peer import PeerConnector

    mover = NixlMover(pool, options.pull_timeout_s, conduct.clock)
    return PeerConnector(mover, options, pool, epoch, notify, conduct=conduct)


def open_store(options: ConnectorOptions, pool: KVPool, epoch: str, notify: Notify, conduct: Conduct) -> Connector:
    from fourhop.kv.folders import open_folder
    from fourhop.kv.store import StoreConnector

    if not options.url:
        raise StartError("the store connector needs kv_connector_extra_config.url: a folder or a URL of fsspec")
    return StoreConnector(open_folder(options.url), options, pool, epoch, notify, conduct=conduct)


CONNECTORS: dict[str, Open] = {
    "shm": open_shm,
    "tcp": open_tcp,
    "nixl": open_nixl,
    "store": open_store,
}
"""`local` is not here: it joins engines of one process, which construct it with the `LocalNetwork` they share."""


def open_connector(
    config: KVTransferConfig, pool: KVPool, epoch: str, notify: Notify, *, conduct: Conduct = PRODUCTION
) -> Connector:
    """The connector that `--kv-transfer-config` names. Raises StartError."""
    if config.kv_connector not in CONNECTORS:
        known = ", ".join(CONNECTORS)
        raise StartError(f"unknown KV connector {config.kv_connector!r}; there are: {known}")
    return CONNECTORS[config.kv_connector](config.kv_connector_extra_config, pool, epoch, notify, conduct)
