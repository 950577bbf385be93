"""How near one core comes to its limits: the engine's prefill and decode against the model's matrix products alone.

    python benchmarks/engine.py [MODEL] [--vllm-python PYTHON]

One process, pinned to one core, one thread, float32. The limits come from the same weights in the same run: every
matrix product of one forward pass, back to back, without anything between; and for one decoding stream the time to read
the weights once. A round measures each row once; the table shows the best round of each, since other processes on the
machine only ever add time. With `--vllm-python`, a Python that has vLLM, one stock vLLM engine on the same core does
the same after it, in float32. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.functional import linear

from fourhop.bench.launch import running
from fourhop.bench.setups import Command, Setup
from fourhop.checkpoint import DEFAULT_MODEL, find
from fourhop.engine.config import EngineConfig
from fourhop.engine.model import LoadedModel, load_model
from fourhop.engine.open import open_engine
from fourhop.tokens.client import RemoteTokenServer
from fourhop.tokens.connection import Timeouts, open_session
from fourhop.tokens.server import TokenServer
from fourhop.wire.generate import GenerateRequest, SamplingParams

NUM_ROUNDS = 5
PREFILL_TOKENS = (128, 512, 2048)
DECODE_STREAMS = (1, 2, 4, 8)
DECODE_PROMPT_TOKENS = 512
DECODE_TOKENS = 24
CONFIG = EngineConfig(device="cpu", dtype="float32", num_threads=1, enable_prefix_caching=False)


@dataclass(frozen=True)
class Products:
    """The matrices of one forward pass: `body` sees every token, `head` only the tokens that are sampled."""

    body: list[torch.Tensor]
    head: torch.Tensor

    @classmethod
    def of(cls, model: LoadedModel) -> Products:
        head = model.module.get_output_embeddings().weight
        modules = model.module.modules()
        linears = [module.weight for module in modules if isinstance(module, torch.nn.Linear)]
        return cls([weight for weight in linears if weight is not head], head)

    def num_bytes(self) -> int:
        return sum(weight.nbytes for weight in [*self.body, self.head])

    def time_s(self, num_tokens: int, num_sampled: int) -> float:
        """Seconds of all products for a step of `num_tokens` tokens of which `num_sampled` are sampled."""
        inputs = {weight.shape[1]: torch.ones(num_tokens, weight.shape[1]) for weight in [*self.body, self.head]}
        sampled = torch.ones(num_sampled, self.head.shape[1])
        started_s = time.perf_counter()
        for weight in self.body:
            linear(inputs[weight.shape[1]], weight)
        linear(sampled, self.head)
        return time.perf_counter() - started_s

    def time_read_s(self) -> float:
        """Seconds to read every weight once, eight accumulators wide."""
        started_s = time.perf_counter()
        for weight in [*self.body, self.head]:
            weight.sum()
        return time.perf_counter() - started_s


@dataclass
class Results:
    """Tokens per second by row, one number a round."""

    rates: dict[str, list[float]] = field(default_factory=dict)

    def note(self, row: str, num_tokens: float, elapsed_s: float) -> None:
        self.rates.setdefault(row, []).append(num_tokens / elapsed_s)

    def best(self) -> dict[str, float]:
        return {row: max(values) for row, values in self.rates.items()}


async def measure(folder: Path) -> dict[str, float]:
    model = load_model(folder, dtype="float32", device="cpu", attention="sdpa", progress=lambda done, total: None)
    products = Products.of(model)
    results = Results()
    async with open_engine(CONFIG, folder, name="benchmark") as engine:
        for number in range(NUM_ROUNDS + 1):
            if number == 1:
                results = Results()  # the first round warms up
            measure_limits(products, results)
            await measure_engine(engine, "engine", results, random.Random(number))
    return results.best()


async def measure_vllm(python: str, model: str) -> dict[str, float]:
    """One stock engine behind no router of ours, the client on the other cores."""
    flags = ("--engine", "vllm", "--vllm-python", python, "--prefill", "0", "--decode", "1", "--max-model-len", "4096")
    command = Command(("fourhop", "up", model, *flags, "--no-enable-prefix-caching", "--port", "0"))
    results = Results()
    with tempfile.TemporaryDirectory() as folder:
        async with open_session() as session, running(Setup("vLLM", "vllm", (command,)), session, Path(folder)) as site:
            (metrics_url,) = site.metrics_urls
            patience = Timeouts(first_byte_s=600.0, idle_s=600.0)
            server = RemoteTokenServer(metrics_url.removesuffix("/metrics"), session, timeouts=patience)
            for number in range(NUM_ROUNDS + 1):
                if number == 1:
                    results = Results()
                await measure_engine(server, "vllm", results, random.Random(number))
    return results.best()


@torch.inference_mode()
def measure_limits(products: Products, results: Results) -> None:
    results.note("read_weights_once", 1, products.time_read_s())
    for num_tokens in PREFILL_TOKENS:
        results.note(f"prefill_{num_tokens}_limit", num_tokens, products.time_s(num_tokens, 1))
    for num_streams in DECODE_STREAMS:
        results.note(f"decode_{num_streams}_limit", num_streams, products.time_s(num_streams, num_streams))


async def measure_engine(engine: TokenServer, name: str, results: Results, source: random.Random) -> None:
    for num_tokens in PREFILL_TOKENS:
        results.note(f"prefill_{num_tokens}_{name}", num_tokens, await prefill_s(engine, num_tokens, source))
    for num_streams in DECODE_STREAMS:
        results.note(f"decode_{num_streams}_{name}", *await decode(engine, num_streams, source))


async def prefill_s(engine: TokenServer, num_tokens: int, source: random.Random) -> float:
    """Seconds from a request to its only token."""
    request = make_request(num_tokens, 1, source)
    started_s = time.perf_counter()
    async for _ in engine.generate(request):
        pass
    return time.perf_counter() - started_s


async def decode(engine: TokenServer, num_streams: int, source: random.Random) -> tuple[int, float]:
    """Tokens, and seconds they took, from when every stream has its first token until the last one ends."""
    arrivals: list[list[float]] = [[] for _ in range(num_streams)]

    async def consume(arrived_s: list[float]) -> None:
        async for chunk in engine.generate(make_request(DECODE_PROMPT_TOKENS, DECODE_TOKENS, source)):
            arrived_s.extend(time.perf_counter() for choice in chunk.choices for _ in choice.token_ids)

    await asyncio.gather(*map(consume, arrivals))
    begin_s = max(times[0] for times in arrivals)
    later = [at for times in arrivals for at in times if at > begin_s]
    return len(later), max(later) - begin_s


def make_request(num_prompt: int, max_tokens: int, source: random.Random) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    prompt = [source.randrange(1000, 40_000) for _ in range(num_prompt)]
    return GenerateRequest(token_ids=prompt, sampling_params=params, stream=True)


def print_table(rates: dict[str, float], weight_bytes: int) -> None:
    print(f"weights {weight_bytes / 1e6:.0f} MB, read at {rates['read_weights_once'] * weight_bytes / 1e9:.1f} GB/s")
    print(f"{'tokens/s':<14}{'limit':>10}{'engine':>10}{'/ limit':>9}{'vLLM':>10}{'/ vLLM':>9}")
    for name in [row.removesuffix("_limit") for row in rates if row.endswith("_limit")]:
        limit, engine, vllm = rates[f"{name}_limit"], rates[f"{name}_engine"], rates.get(f"{name}_vllm")
        beside = "" if vllm is None else f"{vllm:>10.1f}{engine / vllm:>9.2f}"
        print(f"{name:<14}{limit:>10.1f}{engine:>10.1f}{engine / limit:>9.2f}{beside}")


def ratios_of(rates: dict[str, float]) -> dict[str, float]:
    """The figures that this project promises, by name."""
    ratios = {
        "prefill_over_matmul": rates["prefill_512_engine"] / rates["prefill_512_limit"],
        "decode_over_bandwidth": rates["decode_1_engine"] / rates["read_weights_once"],
        "batch8_over_1": rates["decode_8_engine"] / rates["decode_1_engine"],
    }
    for name in ("prefill_512", "prefill_2048", "decode_1", "decode_8"):
        if (vllm := rates.get(f"{name}_vllm")) is not None:
            ratios[f"{name}_over_vllm"] = rates[f"{name}_engine"] / vllm
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description="One engine on one core.")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--vllm-python", help="a Python with vLLM, for its figures in the same run")
    options = parser.parse_args()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})  # the first ones serve interrupts
    torch.set_num_threads(1)
    folder = find(options.model).folder
    rates = asyncio.run(measure(folder))
    if options.vllm_python:
        os.sched_setaffinity(0, cores)
        rates |= asyncio.run(measure_vllm(options.vllm_python, options.model))
    print_table(rates, folder.joinpath("model.safetensors").stat().st_size)
    print(json.dumps({row: round(value, 3) for row, value in {**ratios_of(rates), **rates}.items()}))


if __name__ == "__main__":
    main()
