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
    a signed ticket may name any address. With `checksum` a consumer over `tcp` has the bytes of blocks checked.

    `store` keeps at most about `max_bytes` at `url`, a folder or a URL of fsspec that its engines share;
    `shared_storage_path` is vLLM's name for it. `connectors` are the members of `multi`, first choice first.

    `bidirectional_kv_xfer` and `kv_recompute_threshold` are vLLM's, and accepted: here every pair goes both ways, and
    the router's `--kv-recompute-threshold` says what is worth a transfer. `backends` names what NIXL uses: UCX.
    """

    kv_lease_duration: float = 30.0
    pull_timeout_s: float = 20.0
    host: str = "127.0.0.1"
    port: int = 0
    peers: tuple[str, ...] = ()
    secret: str = ""
    checksum: bool = False
    url: str = ""
    max_bytes: int = 16 * 2**30
    shared_storage_path: str = ""
    connectors: tuple[KVTransferConfig, ...] = ()
    bidirectional_kv_xfer: bool = False
    kv_recompute_threshold: int = 64
    backends: tuple[Literal["UCX"], ...] = ("UCX",)


class KVTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which connector an engine uses and what it does when a pull fails.

    `fail` answers the request with the named error; `recompute` prefills locally instead: slower, and counted.
    The last six keys are for connectors of vLLM that are not here, and mean nothing; but blocks are on the host.
    """

    kv_connector: str
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    engine_id: str = ""
    kv_connector_extra_config: ConnectorOptions = ConnectorOptions()
    kv_buffer_device: Literal["cpu"] = "cpu"
    kv_buffer_size: float = 0.0
    kv_rank: int | None = None
    kv_parallel_size: int = 1
    kv_ip: str = ""
    kv_port: int = 0


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`--kv-events-config JSON`: whether and where an engine tells what its prefix cache has. vLLM's keys.

    `endpoint` and `replay_endpoint` are ZMQ addresses to listen at; vLLM listens on every interface where none is
    given, this on loopback. `buffer_steps` batches are kept for replay, `hwm` wait for a slow subscriber.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""
