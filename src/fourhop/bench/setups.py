"""What is compared: servers as the command lines that start them. Pure.

All set-ups use the same number of engines, one core or GPU each, and have the prefix cache off, so that all may be
asked the same prompts. They are asked at the token endpoint of the router in front of them.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["replicas", "split", "vllm", "other"]


@dataclass(frozen=True)
class Command:
    """A process: what is typed, and the address at which it answers once it is ready (None: it prints it)."""

    argv: tuple[str, ...]
    url: str | None = None

    def __str__(self) -> str:
        return shlex.join(self.argv)


@dataclass(frozen=True)
class Setup:
    """Processes that are started together; the last one is asked. `budget` is the chunk budget, None the default."""

    name: str
    kind: Kind
    commands: tuple[Command, ...]
    budget: int | None = None


def replicas(model: str, num: int, budget: int | None, flags: Sequence[str]) -> Setup:
    """Engines that each do whole requests, behind our router."""
    chunk = () if budget is None else ("--max-num-batched-tokens", str(budget))
    command = _up(model, 0, num, (*chunk, *flags))
    return Setup(f"{num} replicas, {_budget_name(budget)}", "replicas", (command,), budget)


def split(model: str, num_prefill: int, num_decode: int, flags: Sequence[str]) -> Setup:
    """Prefill and decode engines behind our router."""
    return Setup(f"split {num_prefill}:{num_decode}", "split", (_up(model, num_prefill, num_decode, flags),))


def other(text: str, model: str, flags: Sequence[str]) -> Setup:
    """A set-up of the user's own, `NAME=FLAGS` with flags of `fourhop up`. Raises ValueError."""
    name, equals, own = text.partition("=")
    if not name or not equals:
        raise ValueError(f"a set-up is NAME=FLAGS of `fourhop up`, not {text!r}")
    argv = ("fourhop", "up", model, *shlex.split(own), *flags, "--no-enable-prefix-caching", "--port", "0")
    return Setup(name, "other", (Command(argv),))


def stock_vllm(
    program: str, folder: str, name: str, ports: Sequence[int], *, has_gpu: bool, flags: Sequence[str]
) -> Setup:
    """Replicas of stock vLLM behind our router, one GPU or core each, on these ports."""
    commands = []
    for place, port in enumerate(ports):
        pin = f"CUDA_VISIBLE_DEVICES={place}" if has_gpu else f"VLLM_CPU_OMP_THREADS_BIND={place}"
        start = ("env", pin, program, "serve", folder, "--served-model-name", name, "--port", str(port))
        rest = ("--host", "127.0.0.1", "--tokens-only", "--no-enable-prefix-caching", *flags)
        commands.append(Command((*start, *rest), f"http://127.0.0.1:{port}"))
    engines = [part for command in commands for part in ("--decode", str(command.url))]
    router = Command(("fourhop", "router", *engines, "--port", "0"))
    return Setup(f"vLLM, {len(ports)} replicas", "vllm", (*commands, router))


def _up(model: str, num_prefill: int, num_decode: int, flags: Sequence[str]) -> Command:
    engines = ("--prefill", str(num_prefill), "--decode", str(num_decode))
    return Command(("fourhop", "up", model, *engines, *flags, "--no-enable-prefix-caching", "--port", "0"))


def _budget_name(budget: int | None) -> str:
    return "default budget" if budget is None else f"budget {budget}"
