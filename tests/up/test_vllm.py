"""Stock vLLMs as engines of `up`: their command lines and environments, and what is said when there is no vLLM."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fourhop.engine.config import EngineConfig
from fourhop.up.plan import EnginePlan, UpConfig
from fourhop.up.vllm import find_vllm, plan_vllms
from fourhop.wire.errors import StartError

CPU, CUDA = "0.32.0+cpu", "0.32.0"


def plans(version: str = CPU, engine: EngineConfig | None = None, **settings: Any) -> list[EnginePlan]:
    return plan_vllms(
        UpConfig(engine="vllm", vllm_python="/v/bin/python", **settings),
        engine or EngineConfig(),
        Path("/models/m"),
        "m",
        version=version,
        ports=[81, 82],
        side_ports=[91, 92],
        cores=[0, 1],
    )


def transfer_of(plan: EnginePlan) -> dict[str, str]:
    place = plan.arguments.index("--kv-transfer-config")
    decoded: dict[str, str] = msgspec.json.decode(plan.arguments[place + 1])
    return decoded


def test_a_pair_on_a_cpu() -> None:
    prefill, decode = plans()
    assert (prefill.name, prefill.role, prefill.url, prefill.cores) == (
        "prefill-0",
        "prefill",
        "http://127.0.0.1:81",
        (0,),
    )
    assert (decode.name, decode.role, decode.url, decode.cores) == ("decode-0", "decode", "http://127.0.0.1:82", (1,))
    assert prefill.command[:5] == ["/v/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "/models/m"]
    assert {"--enable-scale-out", "--enforce-eager"} <= set(prefill.arguments)
    assert prefill.arguments[prefill.arguments.index("--dtype") + 1] == "float32"
    connector = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
    assert transfer_of(prefill) == connector | {"kv_role": "kv_producer"}
    assert transfer_of(decode) == connector | {"kv_role": "kv_consumer"}
    assert prefill.environment == {
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "91",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
    }
    assert decode.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "92"


def test_what_is_shown_can_be_typed() -> None:
    words = shlex.split(plans()[0].shown)
    assert words[:3] == ["VLLM_NIXL_SIDE_CHANNEL_PORT=91", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=0"]
    assert words[3:6] == ["vllm", "serve", "/models/m"]


def test_off_a_cpu_vllm_decides_how_it_computes() -> None:
    prefill, _ = plans(CUDA)
    assert not {"--enforce-eager", "--dtype"} & set(prefill.arguments)
    assert transfer_of(prefill) == {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    assert prefill.environment == {"VLLM_NIXL_SIDE_CHANNEL_PORT": "91"}


def test_without_prefill_engines_nothing_is_handed_over() -> None:
    for plan in plans(prefill=0, decode=2):
        assert "--kv-transfer-config" not in plan.arguments


def test_engine_settings_become_vllms_own() -> None:
    engine = EngineConfig(max_model_len=512, enable_prefix_caching=False, dtype="bfloat16", kv_cache_bytes=3 << 30)
    prefill, _ = plans(engine=engine, vllm_flags="--seed 3 --limit '{\"a\": 1}'")
    flags = shlex.join(prefill.arguments)
    assert "--max-model-len 512 --no-enable-prefix-caching --dtype bfloat16" in flags
    assert prefill.arguments[-4:] == ("--seed", "3", "--limit", '{"a": 1}')
    assert prefill.environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert "--kv-cache-memory-bytes" in plans(CUDA, engine)[0].arguments


@pytest.mark.parametrize("foreign", [{"num_threads": 2}, {"device": "cpu"}, {"stall_timeout_s": 1.0}])
def test_a_setting_that_vllm_has_no_flag_for_is_refused(foreign: dict[str, Any]) -> None:
    with pytest.raises(StartError, match=next(iter(foreign)).replace("_", "-")):
        plans(engine=EngineConfig(**foreign))


def test_settings_of_the_other_kind_of_engine_are_refused() -> None:
    with pytest.raises(ValueError, match="NIXL"):
        UpConfig(engine="vllm", connector="tcp")
    with pytest.raises(ValueError, match="--engine vllm"):
        UpConfig(vllm_flags="--seed 3")


def test_a_python_without_vllm_and_a_python_that_is_none() -> None:
    with pytest.raises(StartError, match="vLLM is not installed for"):
        asyncio.run(find_vllm(sys.executable))
    with pytest.raises(StartError, match="no Python at /nowhere/python"):
        asyncio.run(find_vllm("/nowhere/python"))
