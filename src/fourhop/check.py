"""`fourhop check transfer A B`: how long KV takes from one engine to another, and what to try next if it is long.

Sends long prompts one at a time, each once to prefill on A and once to decode on B, and times what lies between. The
clock is this process's; durations inside B are B's own (`kv_requested` to `kv_ready`).
"""

from __future__ import annotations

import itertools
import random
import time
from contextlib import aclosing
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from fourhop.tokens.address import check_url
from fourhop.tokens.client import RemoteTokenServer
from fourhop.tokens.connection import open_session
from fourhop.tokens.worker import RemoteWorker
from fourhop.wire.errors import FourhopError, KeyRefused, StartError
from fourhop.wire.generate import GenerateRequest, SamplingParams
from fourhop.wire.moments import Moment
from fourhop.wire.worker import WorkerInfo

NUM_DECODED = 6
"""Tokens after the first: their gaps tell how long one decode step takes, which is not the hand-over's."""

SLOW_TRANSFER_S = 0.1
"""Above this the guide says: fix the transfer before you benchmark anything else."""

SLOW_GB_PER_S = 1.0
HEAVY_OVERHEAD = 0.5


@dataclass(frozen=True)
class CheckConfig:
    """What is sent.

    Attributes:
        lengths: Prompt lengths in tokens; those that do not fit the window are left out.
        repeats: How often each length is sent; medians are shown.
        api_key: Sent to both engines as a bearer token.
    """

    lengths: tuple[int, ...] = (256, 1024, 2048)
    repeats: int = 3
    api_key: str | None = None


@dataclass(frozen=True)
class Sample:
    """One hand-over. `handover_s` is from prefill's first token to decode's next one, less one decode step."""

    num_tokens: int
    num_bytes: int
    transfer_s: float
    handover_s: float

    @property
    def overhead(self) -> float:
        """The share of the hand-over that is not the copy itself."""
        return max(0.0, 1 - self.transfer_s / self.handover_s) if self.handover_s > 0 else 0.0

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.transfer_s / 1e9 if self.transfer_s > 0 else 0.0


async def check_transfer(prefill: str, decode: str, config: CheckConfig) -> None:
    """Measure and print. Raises StartError when the two cannot hand over at all."""
    for url in (prefill, decode):
        _check_url(url)
    try:
        await _measure_all(prefill, decode, config)
    except KeyRefused as error:
        raise StartError(f"{error.url} needs another key: --api-key") from None
    except FourhopError as error:
        raise StartError(error.message) from None


async def _measure_all(prefill: str, decode: str, config: CheckConfig) -> None:
    async with open_session() as session:
        infos = [await _info(RemoteWorker(url, session, api_key=config.api_key)) for url in (prefill, decode)]
        _check_pair(*infos)
        servers = [RemoteTokenServer(url, session, api_key=config.api_key) for url in (prefill, decode)]
        window = min(info.max_model_len for info in infos)
        lengths = [length for length in config.lengths if length + NUM_DECODED + 1 <= window]
        if not lengths:
            raise StartError(f"no prompt length fits the window of {window} tokens")
        samples = []
        for length in lengths:
            runs = [await _measure(servers, infos[1], length, seed=run) for run in range(config.repeats + 1)]
            samples.append(_typical(runs[1:]))  # the first one connects and maps
    _print(infos, samples)


def _check_url(url: str) -> None:
    try:
        check_url(url)
    except ValueError as error:
        raise StartError(str(error)) from None


async def _info(worker: RemoteWorker) -> WorkerInfo:
    info = await worker.check()
    if info is None:
        raise StartError(f"{worker.url} is not a fourhop engine")
    return info


def _check_pair(prefill: WorkerInfo, decode: WorkerInfo) -> None:
    if prefill.connector is None or decode.connector is None:
        raise StartError("both engines need a KV connector: start them with --kv-transfer-config")
    if prefill.connector != decode.connector:
        raise StartError(f"the engines use different connectors: {prefill.connector} and {decode.connector}")
    if prefill.fingerprint != decode.fingerprint:
        raise StartError("one engine's KV is of no use to the other: weights, dtype or block size differ")
    if prefill.epoch == decode.epoch:
        raise StartError("both URLs lead to the same engine")


async def _measure(servers: list[RemoteTokenServer], decode: WorkerInfo, length: int, seed: int) -> Sample:
    """Prefill a prompt that nobody has cached, decode it on the other side."""
    draw = random.Random(f"{time.time_ns()} {length} {seed}")
    prompt = [draw.randrange(decode.vocab_size) for _ in range(length)]
    first, ticket, first_at = await _prefill(servers[0], prompt)
    arrivals: list[float] = []
    moments: dict[str, float] = {}
    async with aclosing(servers[1].generate(_request(prompt, NUM_DECODED + 1, ticket, first))) as chunks:
        async for chunk in chunks:
            moments = chunk.moments or moments
            arrivals += [time.perf_counter()] * sum(len(choice.token_ids) for choice in chunk.choices)
    step_s = median(later - earlier for earlier, later in itertools.pairwise(arrivals))
    num_blocks = -(-length // decode.block_size)
    return Sample(
        num_tokens=length,
        num_bytes=num_blocks * decode.kv_block_bytes,
        transfer_s=moments[Moment.KV_READY] - moments[Moment.KV_REQUESTED],
        handover_s=arrivals[0] - first_at - step_s,
    )


async def _prefill(server: RemoteTokenServer, prompt: list[int]) -> tuple[list[int], dict[str, Any], float]:
    """The first token, the ticket, and when the token arrived."""
    first: list[int] = []
    ticket: dict[str, Any] | None = None
    first_at = 0.0
    async with aclosing(server.generate(_request(prompt, 1, {"do_remote_decode": True}, []))) as chunks:
        async for chunk in chunks:
            if chunk.choices and not first:
                first, first_at = chunk.choices[0].token_ids, time.perf_counter()
            ticket = chunk.kv_transfer_params or ticket
    if ticket is None:
        raise StartError(f"{server.url} returned no ticket")
    return first, ticket, first_at


def _request(prompt: list[int], max_tokens: int, transfer: dict[str, Any], output: list[int]) -> GenerateRequest:
    return GenerateRequest(
        token_ids=prompt,
        request_id="check-transfer",
        sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=0),
        kv_transfer_params=transfer,
        output_token_ids=output,
    )


def _typical(runs: list[Sample]) -> Sample:
    return Sample(
        runs[0].num_tokens,
        runs[0].num_bytes,
        median(run.transfer_s for run in runs),
        median(run.handover_s for run in runs),
    )


def _print(infos: list[WorkerInfo], samples: list[Sample]) -> None:
    table = Table(title=f"{infos[0].engine_id} → {infos[1].engine_id} over {infos[0].connector}")
    for heading in ("prompt tokens", "KV, MB", "transfer, ms", "GB/s", "hand-over, ms", "overhead"):
        table.add_column(heading, justify="right")
    for sample in samples:
        table.add_row(
            str(sample.num_tokens),
            f"{sample.num_bytes / 1e6:.1f}",
            f"{sample.transfer_s * 1e3:.1f}",
            f"{sample.gb_per_s:.1f}",
            f"{sample.handover_s * 1e3:.1f}",
            f"{sample.overhead:.0%}",
        )
    console = Console()
    console.print(table)
    console.print(verdict(samples[-1], infos[0].connector or ""), highlight=False)


def verdict(longest: Sample, connector: str) -> str:
    """What the figures of the longest prompt mean, and the next thing to try."""
    if longest.gb_per_s < SLOW_GB_PER_S or longest.transfer_s > SLOW_TRANSFER_S:
        remedy = {
            "tcp": "use shm if both engines are on one host, nixl if the network has RDMA",
            "shm": "check that each engine has a core of its own and that memory is not swapped",
            "nixl": "check which UCX transports are used (UCX_TLS, UCX_NET_DEVICES)",
            "store": "put the store on a faster disk, or use a connector that moves KV directly",
        }.get(connector, "check the network between the engines")
        return f"Slow: {longest.transfer_s * 1e3:.0f} ms for {longest.num_tokens} tokens. Fix this first: {remedy}."
    if longest.overhead > HEAVY_OVERHEAD and longest.handover_s > SLOW_TRANSFER_S:
        return (
            f"The copy is quick, but {longest.overhead:.0%} of the hand-over is not the copy: look at the decode "
            "engine's queue and step time (vllm:num_requests_waiting), or lower --max-num-batched-tokens there."
        )
    return "Good: the hand-over costs little. Next, compare split and collocated under load: fourhop bench compare."
