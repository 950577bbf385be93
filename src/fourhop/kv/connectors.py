"""Connector names and what they open. A connector's modules are imported when it is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec.structs import replace

from fourhop.kv.config import ConnectorOptions, KVTransferConfig
from fourhop.kv.connector import Connector, Notify
from fourhop.kv.layout import KVPool
from fourhop.kv.pulls import PRODUCTION, Conduct
from fourhop.wire.errors import StartError

logger = logging.getLogger(__name__)

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

    url = options.url or options.shared_storage_path
    if not url:
        raise StartError("the store connector needs kv_connector_extra_config.url: a folder or a URL of fsspec")
    return StoreConnector(open_folder(url), options, pool, epoch, notify, conduct=conduct)


def open_multi(options: ConnectorOptions, pool: KVPool, epoch: str, notify: Notify, conduct: Conduct) -> Connector:
    """A secret of the chain is its members' too: what it signs is the ticket for all of them."""
    from fourhop.kv.multi import MultiConnector

    if not options.connectors:
        raise StartError("the multi connector needs kv_connector_extra_config.connectors: a list of its members")

    def opener(member: KVTransferConfig) -> Callable[[Notify], Connector]:
        own = member.kv_connector_extra_config
        inherited = replace(own, secret=own.secret or options.secret)
        config = replace(member, kv_connector_extra_config=inherited)
        return lambda notify: open_connector(config, pool, epoch, notify, conduct=conduct)

    return MultiConnector([opener(member) for member in options.connectors], notify)


CONNECTORS: dict[str, Open] = {
    "shm": open_shm,
    "tcp": open_tcp,
    "nixl": open_nixl,
    "store": open_store,
    "multi": open_multi,
}
"""`local` is not here: it joins engines of one process, which construct it with the `LocalNetwork` they share."""


VLLM_NAMES = {
    "NixlConnector": "nixl",
    "NixlPullConnector": "nixl",
    "ExampleConnector": "store",
    "SharedStorageConnector": "store",
    "MultiConnector": "multi",
}
"""vLLM's connectors, and what does the same here. The wire is our own: both sides of a transfer must be."""

MOONCAKE = "its wheel does not load without libibverbs, and its TCP was slower than tcp"

LEFT_OUT = {
    "mooncake": MOONCAKE,
    "MooncakeConnector": MOONCAKE,
    "NixlPushConnector": "blocks are pulled here; take nixl",
}
"""Names that users may try, and why there is no such connector."""


def open_connector(
    config: KVTransferConfig, pool: KVPool, epoch: str, notify: Notify, *, conduct: Conduct = PRODUCTION
) -> Connector:
    """The connector that `--kv-transfer-config` names. Raises StartError."""
    name = VLLM_NAMES.get(config.kv_connector, config.kv_connector)
    if name not in CONNECTORS:
        known = ", ".join([*CONNECTORS, *VLLM_NAMES])
        if name in LEFT_OUT:
            raise StartError(f"no KV connector {name!r}: {LEFT_OUT[name]}; there are: {known}")
        raise StartError(f"unknown KV connector {config.kv_connector!r}; there are: {known}")
    if name != config.kv_connector:
        logger.info("KV connector %s is %s here", config.kv_connector, name)
    return CONNECTORS[name](config.kv_connector_extra_config, pool, epoch, notify, conduct)
