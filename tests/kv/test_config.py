"""`--kv-transfer-config`: vLLM's names and keys, and what is refused by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.kv_world import LAYOUT
from fourhop.kv.config import KVTransferConfig
from fourhop.kv.connectors import CONNECTORS, VLLM_NAMES, open_connector
from fourhop.kv.layout import KVPool


def parse(**keys: Any) -> KVTransferConfig:
    return msgspec.json.decode(msgspec.json.encode({"kv_connector": "NixlConnector", **keys}), type=KVTransferConfig)


def opened_name(config: KVTransferConfig) -> str:
    pool = KVPool(LAYOUT)
    connector = open_connector(config, pool, "epoch-1", lambda: None)
    connector.close()
    pool.close()
    return connector.name


def test_table_leads_to_connectors_that_exist() -> None:
    assert set(VLLM_NAMES.values()) <= set(CONNECTORS)


def test_vllm_command_lines_start_and_say_what_they_mean(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shared = parse(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    assert opened_name(shared) == "store"
    assert caplog.messages == ["KV connector ExampleConnector is store here"]
    assert (
        opened_name(parse(kv_role="kv_producer", kv_buffer_device="cpu", kv_load_failure_policy="recompute")) == "nixl"
    )
    members = [{"kv_connector": "tcp"}, {"kv_connector": "SharedStorageConnector"}]
    members[1]["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path)}  # type: ignore[assignment]
    chain = parse(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": members})
    assert opened_name(chain) == "multi"


def test_own_names_need_no_translation(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert opened_name(parse(kv_connector="tcp")) == "tcp"
    assert not caplog.messages


def test_keys_that_mean_nothing_here_are_accepted() -> None:
    parse(kv_rank=1, kv_parallel_size=2, kv_buffer_size=1e9, kv_ip="10.0.0.1", kv_port=14579, engine_id="e")
    extra = parse(
        kv_connector_extra_config={"backends": ["UCX"], "bidirectional_kv_xfer": True}
    ).kv_connector_extra_config
    assert (extra.bidirectional_kv_xfer, extra.kv_recompute_threshold) == (True, 64)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kv_buffer_device": "cuda"}, r"Invalid enum value 'cuda' - at `\$\.kv_buffer_device`"),
        ({"enable_permute_local_kv": True}, "unknown field `enable_permute_local_kv`"),
        ({"kv_connector_module_path": "my.module"}, "unknown field `kv_connector_module_path`"),
        ({"kv_connector_extra_config": {"backends": ["GDS"]}}, r"'GDS' - at `\$\.kv_connector_extra_config\.backends"),
        ({"kv_connector_extra_config": {"lmcache_rpc_port": 1}}, "unknown field `lmcache_rpc_port`"),
        ({"kv_connector_extra_config": {"connectors": [{"kv_connector": 1}]}}, r"connectors\[0\]\.kv_connector"),
    ],
)
def test_keys_that_would_change_something_are_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        parse(**keys)
