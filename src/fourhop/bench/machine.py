"""What a result was measured on: processor, memory, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

from fourhop import __version__

PACKAGES = ("torch", "transformers", "vllm")


def describe_machine() -> dict[str, str]:
    """Names and values, to be printed in this order."""
    cores = sorted(os.sched_getaffinity(0))
    total_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    versions = [f"{name} {version}" for name in PACKAGES if (version := _version(name)) is not None]
    return {
        "processor": _processor(),
        "cores": f"{len(cores)} ({','.join(str(core) for core in cores)})",
        "memory": f"{total_gib:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "fourhop": __version__,
        "packages": ", ".join(versions) or "none",
    }


def has_gpu() -> bool:
    """There is a GPU of the kind that vLLM would take."""
    return Path("/proc/driver/nvidia/gpus").exists()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
