"""`--kv-transfer-config JSON`: vLLM's keys where they mean the same; unknown keys are errors."""

from __future__ import annotations

from typing import Literal

import msgspec


class ConnectorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`. Durations in seconds.

    A pull may last as long as its blocks take to be computed; it fails when the producer was not heard of for
    `pull_timeout_s`, which should be a few times the second in which a producer speaks at least once. `host` and `port`
    are where this engine's blocks can be pulled, `peers` the only addresses that it connects to, each a host or
    network with or without a port; when there are none it is loopback and `host`. With a `secret`, which signs tickets,
    a signed ticket may name any address.

    `store` keeps at most about `max_bytes` at `url`, a folder or a URL of fsspec that its engines share.
    """

    kv_lease_duration: float = 30.0
    pull_timeout_s: float = 20.0
    host: str = "127.0.0.1"
    port: int = 0
    peers: tuple[str, ...] = ()
    secret: str = ""
    url: str = ""
    max_bytes: int = 16 * 2**30


class KVTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which connector an engine uses and what it does when a pull fails.

    `fail` answers the request with the named error; `recompute` prefills locally instead: slower, and counted.
    """

    kv_connector: str
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    engine_id: str = ""
    kv_connector_extra_config: ConnectorOptions = ConnectorOptions()
