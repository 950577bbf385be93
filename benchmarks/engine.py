"""How near one core comes to its limits: the engine's prefill and decode against the model's matrix products alone.

    python benchmarks/engine.py [MODEL] [--vllm-python PYTHON]

One process, pinned to one core, one thread, float32. The limits come from the same weights in the same run: every
matrix product of one forward pass, back to back, without anything between; and for one decoding stream the time to read
the weights once. A round measures each row once. With `--vllm-python`, a Python that has vLLM, one stock vLLM engine on
the same core takes turns with it, in float32, its client on any core. A machine may change its speed by half within
minutes, so a ratio is the median of the rounds' ratios; the rates are those of the best round of each row. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
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

NUM_ROUNDS = 3
SETTLE_S = 5.0
"""vLLM's worker keeps its core busy for some time after its last request."""
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

    def ratio(self, row: str, other: str) -> float:
        """The median of the rounds' ratios."""
        pairs = zip(self.rates[row], self.rates[other], strict=True)
        return statistics.median(rate / other_rate for rate, other_rate in pairs)


async def measure(folder: Path, model: str, vllm_python: str | None) -> Results:
    cores = os.sched_getaffinity(0)
    core = {max(cores)}  # the first ones serve interrupts
    async with AsyncExitStack() as stack:
        vllm = None if vllm_python is None else await stack.enter_async_context(stock_engine(vllm_python, model))
        os.sched_setaffinity(0, core)
        loaded = load_model(folder, dtype="float32", device="cpu", attention="sdpa", progress=lambda done, total: None)
        products = Products.of(loaded)
        engine = await stack.enter_async_context(open_engine(CONFIG, folder, name="benchmark"))
        results = Results()
        for number in range(NUM_ROUNDS + 1):
            if number == 1:
                results = Results()  # the first round warms up
            measure_limits(products, results)
            await measure_engine(engine, "engine", results, random.Random(number))
            if vllm is not None:
                os.sched_setaffinity(0, cores)
                await measure_engine(vllm, "vllm", results, random.Random(number))
                os.sched_setaffinity(0, core)
                await asyncio.sleep(SETTLE_S)
    return results


@asynccontextmanager
async def stock_engine(python: str, model: str) -> AsyncIterator[TokenServer]:
    """One stock engine behind no router of ours."""
    flags = ("--engine", "vllm", "--vllm-python", python, "--prefill", "0", "--decode", "1", "--max-model-len", "4096")
    command = Command(("fourhop", "up", model, *flags, "--no-enable-prefix-caching", "--port", "0"))
    with tempfile.TemporaryDirectory() as folder:
        async with open_session() as session, running(Setup("vLLM", "vllm", (command,)), session, Path(folder)) as site:
            (metrics_url,) = site.metrics_urls
            patience = Timeouts(first_byte_s=600.0, idle_s=600.0)
            yield RemoteTokenServer(metrics_url.removesuffix("/metrics"), session, timeouts=patience)


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


def print_table(results: Results, weight_bytes: int) -> None:
    rates = results.best()
    print(f"weights {weight_bytes / 1e6:.0f} MB, read at {rates['read_weights_once'] * weight_bytes / 1e9:.1f} GB/s")
    print(f"{'tokens/s':<14}{'limit':>10}{'engine':>10}{'/ limit':>9}{'vLLM':>10}{'/ vLLM':>9}")
    for name in [row.removesuffix("_limit") for row in rates if row.endswith("_limit")]:
        limit, engine, vllm = f"{name}_limit", f"{name}_engine", f"{name}_vllm"
        line = f"{name:<14}{rates[limit]:>10.1f}{rates[engine]:>10.1f}{results.ratio(engine, limit):>9.2f}"
        print(line + (f"{rates[vllm]:>10.1f}{results.ratio(engine, vllm):>9.2f}" if vllm in rates else ""))


def ratios_of(results: Results) -> dict[str, float]:
    """The figures that this project promises, by name."""
    ratios = {
        "prefill_over_matmul": results.ratio("prefill_512_engine", "prefill_512_limit"),
        "decode_over_bandwidth": results.ratio("decode_1_engine", "read_weights_once"),
        "batch8_over_1": results.ratio("decode_8_engine", "decode_1_engine"),
    }
    for name in ("prefill_512", "prefill_2048", "decode_1", "decode_8"):
        if f"{name}_vllm" in results.rates:
            ratios[f"{name}_over_vllm"] = results.ratio(f"{name}_engine", f"{name}_vllm")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description="One engine on one core.")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--vllm-python", help="a Python with vLLM, for its figures in the same run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = find(options.model).folder
    results = asyncio.run(measure(folder, options.model, options.vllm_python))
    print_table(results, folder.joinpath("model.safetensors").stat().st_size)
    print(json.dumps({row: round(value, 3) for row, value in {**ratios_of(results), **results.best()}.items()}))


if __name__ == "__main__":
    main()
