"""What `fourhop up` will start: engines, their ports, their cores and their command lines. Pure."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from fourhop.kv.config import KVTransferConfig


@dataclass(frozen=True)
class UpConfig:
    """How many engines on this machine, and how KV moves between them.

    Attributes:
        prefill: Engines that process prompts. 0: every engine does whole requests, and no KV moves.
        decode: Engines that generate tokens.
        connector: How KV blocks move: shm is one copy on this machine, tcp is what would cross a network. Between vLLMs
            it is NIXL.
        cores_per_engine: CPU cores that each engine is pinned to.
        engine: What the engines are: fourhop's own, or stock vLLMs.
        vllm_python: The Python that vLLM is installed for. Default: this one.
        vllm_flags: More flags for `vllm serve`, as one string.
    """

    prefill: int = 1
    decode: int = 1
    connector: Literal["shm", "tcp"] = "shm"
    cores_per_engine: int = 1
    engine: Literal["fourhop", "vllm"] = "fourhop"
    vllm_python: str = sys.executable
    vllm_flags: str = ""

    def __post_init__(self) -> None:
        for name, least in (("prefill", 0), ("decode", 1), ("cores_per_engine", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}")
        if self.engine == "vllm" and self.connector != "shm":
            raise ValueError("--connector is for fourhop's engines; vLLMs hand over through NIXL")
        if self.engine != "vllm" and (self.vllm_flags or self.vllm_python != sys.executable):
            raise ValueError("--vllm-python and --vllm-flags are for --engine vllm")

    @property
    def num_engines(self) -> int:
        return self.prefill + self.decode


@dataclass(frozen=True)
class EnginePlan:
    """One engine: `arguments` are what a user would type after the name of `program`, `cores` the CPUs it is pinned to.

    `python` runs the module `program`; `environment` is added to that of this process.
    """

    name: str
    role: Literal["prefill", "decode"]
    url: str
    cores: tuple[int, ...]
    arguments: tuple[str, ...]
    python: str = sys.executable
    program: str = "fourhop"
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        return [self.python, "-m", self.program, *self.arguments]

    @property
    def shown(self) -> str:
        """The command as a user would type it."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return shlex.join([*settings, self.program.partition(".")[0], *self.arguments])


def plan_engines(
    config: UpConfig, model: str, *, ports: Sequence[int], cores: Sequence[int], flags: Sequence[str]
) -> list[EnginePlan]:
    """A plan per engine, prefill first. `ports` has one per engine; `flags` go to every engine."""
    shares = share_cores(cores, config.num_engines, config.cores_per_engine)
    return [
        _plan(config, model, name, port, share, flags)
        for name, port, share in zip(engine_names(config), ports, shares, strict=True)
    ]


def engine_names(config: UpConfig) -> list[str]:
    """What the engines are called, prefill first."""
    decodes = "decode" if config.prefill else "engine"
    return [*(f"prefill-{i}" for i in range(config.prefill)), *(f"{decodes}-{i}" for i in range(config.decode))]


def _plan(
    config: UpConfig,
    model: str,
    name: str,
    port: int,
    cores: tuple[int, ...],
    flags: Sequence[str],
) -> EnginePlan:
    role = role_of(name)
    arguments = ("engine", model, "--port", str(port), *_transfer_flags(config, role), *flags)
    return EnginePlan(name, role, f"http://127.0.0.1:{port}", cores, arguments)


def role_of(name: str) -> Literal["prefill", "decode"]:
    return "prefill" if name.startswith("prefill") else "decode"


def _transfer_flags(config: UpConfig, role: Literal["prefill", "decode"]) -> tuple[str, ...]:
    """How the engine hands over, if there is a pair to do it."""
    if not config.prefill:
        return ()
    transfer = KVTransferConfig(
        kv_connector=config.connector, kv_role="kv_producer" if role == "prefill" else "kv_consumer"
    )
    given = {"kv_connector": transfer.kv_connector, "kv_role": transfer.kv_role}
    return ("--kv-transfer-config", msgspec.json.encode(given).decode())


def share_cores(cores: Sequence[int], num_engines: int, each: int) -> list[tuple[int, ...]]:
    """Cores for each engine, the last ones first to be taken, so that the others are the frontend's.

    With too few, engines take turns: as many as fit have cores of their own, the next begin again from the start.
    """
    groups = max(1, min(num_engines, len(cores) // each))
    first = len(cores) - groups * min(each, len(cores))
    taken = [tuple(cores[first + group * each : first + (group + 1) * each]) for group in range(groups)]
    return [taken[engine % groups] for engine in range(num_engines)]


def engines_per_core(plans: Iterable[EnginePlan]) -> int:
    """The most engines that share one core: 1 when each has its own."""
    counts: dict[int, int] = {}
    for plan in plans:
        for core in plan.cores:
            counts[core] = counts.get(core, 0) + 1
    return max(counts.values())


def flags_of(config: Any) -> list[str]:
    """The command-line flags that make this frozen dataclass: those fields that are not at their default."""
    flags: list[str] = []
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            flags += [part for item in value for part in (f"--{flag}", str(item))]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def backoff_s(num_failures: int) -> float:
    """Seconds to wait before an engine is started again: 0.5, 1, 2, ... at most 30."""
    return min(30.0, (1 << min(num_failures - 1, 6)) / 2)
