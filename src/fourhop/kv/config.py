"""`--kv-transfer-config JSON`: vLLM's keys where they mean the same; unknown keys are errors."""

from __future__ import annotations

from typing import Literal

import msgspec


class ConnectorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`. Durations in seconds."""

    kv_lease_duration: float = 30.0
    pull_timeout_s: float = 20.0
    host: str = "127.0.0.1"
    port: int = 0


class KVTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which connector an engine uses and what it does when a pull fails.

    `fail` answers the request with the named error; `recompute` prefills locally instead: slower, and counted.
    """

    kv_connector: str
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    engine_id: str = ""
    kv_connector_extra_config: ConnectorOptions = ConnectorOptions()
