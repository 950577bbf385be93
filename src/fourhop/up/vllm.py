"""Stock vLLMs as the engines of `fourhop up`: what `vllm serve` is told, and which vLLM there is."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fourhop.engine.config import EngineConfig
from fourhop.up.plan import EnginePlan, UpConfig, engine_names, role_of, share_cores
from fourhop.wire.errors import StartError

PROGRAM = "vllm.entrypoints.cli.main"
ASK_VERSION = "import importlib.metadata as m; print(m.version('vllm'))"
ASK_TIMEOUT_S = 60.0

SAME: dict[str, str] = {
    "max_model_len": "--max-model-len",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_seqs": "--max-num-seqs",
    "block_size": "--block-size",
    "num_blocks": "--num-gpu-blocks-override",
    "max_logprobs": "--max-logprobs",
}
"""Our settings that are flags of vLLM with the same meaning."""
FOREIGN = ("device", "num_threads", "stall_timeout_s")
"""Our settings that vLLM has no flag for."""


async def find_vllm(python: str) -> str:
    """The version of the vLLM that this Python has. Raises StartError."""
    try:
        process = await asyncio.create_subprocess_exec(
            python, "-c", ASK_VERSION, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        raise StartError(f"no Python at {python}: {error.strerror}; --vllm-python PATH names one with vLLM") from None
    async with asyncio.timeout(ASK_TIMEOUT_S):
        output, _ = await process.communicate()
    if process.returncode != 0:
        raise StartError(f"vLLM is not installed for {python}; --vllm-python PATH names a Python that has it")
    return output.decode().strip()


def plan_vllms(
    config: UpConfig,
    engine: EngineConfig,
    folder: Path,
    name: str,
    *,
    version: str,
    ports: Sequence[int],
    side_ports: Sequence[int],
    cores: Sequence[int],
) -> list[EnginePlan]:
    """A plan per engine, prefill first. `side_ports` are where NIXL tells other engines of its blocks."""
    is_cpu = "cpu" in version
    flags = [*vllm_flags(engine, is_cpu=is_cpu), *shlex.split(config.vllm_flags)]
    shares = share_cores(cores, config.num_engines, config.cores_per_engine)
    return [
        EnginePlan(
            name=plan_name,
            role=role_of(plan_name),
            url=f"http://127.0.0.1:{port}",
            cores=share,
            arguments=(*_address(folder, name, port), *_transfer(config, plan_name, is_cpu=is_cpu), *flags),
            python=config.vllm_python,
            program=PROGRAM,
            environment=_environment(engine, share, side_port, is_cpu=is_cpu),
        )
        for plan_name, port, side_port, share in zip(engine_names(config), ports, side_ports, shares, strict=True)
    ]


def vllm_flags(engine: EngineConfig, *, is_cpu: bool) -> list[str]:
    """Our engine settings as vLLM's flags, those that were given. Raises StartError for what vLLM has no flag for."""
    default = EngineConfig()
    given = {name for name in EngineConfig.__dataclass_fields__ if getattr(engine, name) != getattr(default, name)}
    foreign = next((name for name in FOREIGN if name in given), None)
    if foreign is not None:
        raise StartError(f"--{foreign.replace('_', '-')} is not a setting of vLLM; see --vllm-flags")
    flags = [part for name, flag in SAME.items() if name in given for part in (flag, str(getattr(engine, name)))]
    flags += [] if engine.enable_prefix_caching else ["--no-enable-prefix-caching"]
    # bfloat16 gives wrong text on a CPU without AVX-512, and a compiled model takes minutes to start there.
    dtype = "float32" if is_cpu and engine.dtype == "auto" else engine.dtype
    flags += [] if dtype == "auto" else ["--dtype", dtype]
    flags += ["--enforce-eager"] if is_cpu else []
    if "kv_cache_bytes" in given and not is_cpu:
        flags += ["--kv-cache-memory-bytes", str(engine.kv_cache_bytes)]
    return flags


def _address(folder: Path, name: str, port: int) -> tuple[str, ...]:
    served = ("--served-model-name", name, "--host", "127.0.0.1", "--port", str(port))
    return ("serve", str(folder), *served, "--enable-scale-out", "--disable-uvicorn-access-log")


def _transfer(config: UpConfig, name: str, *, is_cpu: bool) -> tuple[str, ...]:
    """How the engine hands over, if there is a pair to do it."""
    if not config.prefill:
        return ()
    role = "kv_producer" if role_of(name) == "prefill" else "kv_consumer"
    transfer = {"kv_connector": "NixlConnector", "kv_role": role} | ({"kv_buffer_device": "cpu"} if is_cpu else {})
    return ("--kv-transfer-config", msgspec.json.encode(transfer).decode())


def _environment(engine: EngineConfig, cores: tuple[int, ...], side_port: int, *, is_cpu: bool) -> dict[str, str]:
    settings = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
    if is_cpu:
        settings["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(engine.kv_cache_bytes / 2**30)))
        settings["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
    return settings
