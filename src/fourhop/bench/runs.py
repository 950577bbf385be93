"""One measured run against one target: what `bench serve` is, and what `sweep` and `compare` are made of."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice

import msgspec

from fourhop.bench import workload as workloads
from fourhop.bench.bodies import Bodies
from fourhop.bench.cache import CacheCounts, cache_warning, read_counts
from fourhop.bench.client import Answer, Client
from fourhop.bench.config import LoadConfig, MetricsConfig, SamplingConfig, TargetConfig
from fourhop.bench.dataset_config import DatasetConfig
from fourhop.bench.drive import Driver, Options, Run
from fourhop.bench.hops import median_hops
from fourhop.bench.jobs import Workload
from fourhop.bench.measure import Summary, summarize
from fourhop.bench.progress import ProgressLine
from fourhop.bench.result import Result
from fourhop.bench.vocabulary import open_vocabulary
from fourhop.bench.workload import Job, Vocabulary
from fourhop.tokens.connection import Session, Timeouts, call, open_session, request_headers
from fourhop.wire.errors import FourhopError, StartError

READY_PAUSE_S = 1.0
LATE_S = 0.05
"""A client that is later than this with a request is itself part of what it measures."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run: what is sent where, and what is computed."""

    target: TargetConfig
    load: LoadConfig
    dataset: DatasetConfig = dataclasses.field(default_factory=DatasetConfig)
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
    keeps_text: bool = False
    shows_progress: bool = True
    title: str = "bench"


@dataclass(frozen=True)
class Bench:
    """What every run against one target needs; made by `open_bench`."""

    session: Session
    model: str
    tokenizer: str
    vocabulary: Vocabulary

    async def run(self, plan: Plan) -> Result:
        """Warm up, run, measure. Ctrl-C ends the run early: the result is of what there is. Raises StartError."""
        workload = Workload(plan.dataset, self.vocabulary, plan.load)
        if plan.target.ready_check_timeout_sec:
            await self._wait_until_ready(plan, workload)
        await self._warm_up(plan, workload)
        before = await self._counts(plan)
        date = datetime.now().astimezone()
        run = await self._drive(plan, workload.scheduled(), workload.num_requests, title=plan.title)
        after = await self._counts(plan)
        hit_rate = None if before is None or after is None else after.since(before).rate
        summary = summarize(
            run.records,
            run.duration_s,
            limits=plan.metrics.limits(),
            metrics=plan.metrics.metrics,
            percentiles=plan.metrics.percentiles,
        )
        if hit_rate is None and summary.num_cached is not None and summary.num_input:
            hit_rate = summary.num_cached / summary.num_input
        return Result(
            target=plan.target,
            load=plan.load,
            model=self.model,
            tokenizer=self.tokenizer,
            date=date,
            summary=summary,
            records=run.records,
            hops=median_hops(record for record in run.records if record.is_good),
            cache_hit_rate=hit_rate,
            warnings=list(_warnings(plan, workload, summary, hit_rate)),
            is_cut=run.is_cut,
        )

    async def _drive(self, plan: Plan, schedule: Iterable[tuple[float, Job]], num: int, *, title: str) -> Run:
        target, load = plan.target, plan.load
        ignores_eos = plan.sampling.ignore_eos
        if ignores_eos is None:
            ignores_eos = plan.dataset.dataset_name != "sharegpt"
        bodies = Bodies(target, plan.sampling, self.model, ignore_eos=ignores_eos)
        client = Client(partial(_send, self.session, target), time.perf_counter, self._estimate)
        options = Options(
            prefix=target.request_id_prefix or f"bench-{secrets.token_hex(4)}-",
            max_concurrency=load.max_concurrency,
            think_time_s=plan.dataset.think_time_s,
            keeps_text=plan.keeps_text,
        )
        progress = ProgressLine(title, num, lambda: client.num_open, is_shown=plan.shows_progress)
        with progress:
            driver = Driver(client, bodies, self.vocabulary, progress, options)
            with on_interrupt(driver.stop):
                return await driver.run(schedule)

    def _estimate(self, text: str) -> int:
        return len(self.vocabulary.encode(text))

    async def _wait_until_ready(self, plan: Plan, workload: Workload) -> None:
        """Until a request succeeds. Raises StartError with why the last one did not."""
        deadline_s = time.monotonic() + plan.target.ready_check_timeout_sec
        while cause := await self._trouble(plan, workload, 1, "ready?"):
            if time.monotonic() > deadline_s:
                raise StartError(f"{plan.target.url} is not ready: {cause}")
            await asyncio.sleep(READY_PAUSE_S)

    async def _warm_up(self, plan: Plan, workload: Workload) -> None:
        if plan.load.num_warmups and (cause := await self._trouble(plan, workload, plan.load.num_warmups, "warm-up")):
            raise StartError(f"the warm-up failed: {cause}")

    async def _trouble(self, plan: Plan, workload: Workload, num: int, title: str) -> str | None:
        """Send warm-up requests one after another; why one failed, None if none did."""
        sample = list(islice(workload.jobs(), num))
        # A seed that is drawn: a run that is repeated must not find the prompts of this warm-up in a cache either.
        jobs = workloads.warm_up(sample, self.vocabulary, secrets.randbits(32), num)
        alone = dataclasses.replace(plan.load, max_concurrency=1)
        plan = dataclasses.replace(plan, load=alone, shows_progress=False)
        run = await self._drive(plan, ((0.0, job) for job in jobs), num, title=title)
        if run.is_cut:
            raise KeyboardInterrupt
        return next((record.error for record in run.records if record.error is not None), None)

    async def _counts(self, plan: Plan) -> CacheCounts | None:
        return await read_counts(self.session, plan.target.metrics_urls, plan.target.api_key)


@asynccontextmanager
async def open_bench(target: TargetConfig) -> AsyncIterator[Bench]:
    """The connections, model and vocabulary for runs against this target. Raises StartError."""
    async with open_session() as session:
        model = target.model or await _first_model(session, target)
        tokenizer = target.tokenizer or model
        yield Bench(session, model, tokenizer, open_vocabulary(tokenizer))


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def _first_model(session: Session, target: TargetConfig) -> str:
    url = f"{target.root}/v1/models"
    timeouts = Timeouts(connect_s=5.0, first_byte_s=30.0, idle_s=30.0)
    try:
        async with call(session, "GET", url, timeouts=timeouts, headers=_headers(target)) as answer:
            models = msgspec.json.decode(await answer.read_all(), type=_Models).data
    except (FourhopError, msgspec.DecodeError) as error:
        raise StartError(f"{url} names no model ({error}): give --model") from None
    if not models:
        raise StartError(f"{url} lists no model: give --model")
    return models[0].id


def _headers(target: TargetConfig) -> dict[str, str]:
    more = dict(text.split("=", 1) for text in target.header)
    return request_headers(target.api_key) | {"Accept": "text/event-stream"} | more


@asynccontextmanager
async def _send(session: Session, target: TargetConfig, body: bytes, headers: dict[str, str]) -> AsyncIterator[Answer]:
    patience = Timeouts(connect_s=10.0, first_byte_s=target.request_timeout_s, idle_s=target.request_timeout_s)
    async with call(
        session, "POST", target.url, timeouts=patience, body=body, headers=_headers(target) | headers
    ) as answer:
        yield answer


@contextmanager
def on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `stop`, once; the next one ends the program as usual."""
    loop = asyncio.get_running_loop()

    def once() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        print("stopping: the result is of what there is", file=sys.stderr)
        stop()

    loop.add_signal_handler(signal.SIGINT, once)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _warnings(plan: Plan, workload: Workload, summary: Summary, hit_rate: float | None) -> Iterator[str]:
    """What makes the numbers doubtful."""
    if (text := cache_warning(hit_rate, is_wanted=plan.dataset.shares_prefixes)) is not None:
        yield text
    if workload.num < plan.load.num_prompts:
        yield f"the dataset has {workload.num} prompts, not {plan.load.num_prompts}: none is sent twice"
    is_paced = plan.load.request_rate < math.inf or plan.load.ramp_up_strategy is not None
    if is_paced and summary.lag.worst is not None and summary.lag.worst > LATE_S:
        yield f"the client was up to {summary.lag.worst * 1000:.0f} ms late with a request: it needs a core of its own"
    if summary.num_mismatched:
        yield f"{summary.num_mismatched} answers have another number of token ids than their usage says; ids count"
    if summary.sources.get("estimate"):
        yield f"output tokens of {summary.sources['estimate']} answers are estimates: the text, tokenized again"
    if summary.itl_unknown:
        yield (
            f"{summary.itl_unknown} answers are not in ITL: their chunks hold unknown numbers of tokens "
            "(chunk_gap has them; --backend vllm or generate tells each token)"
        )
    if summary.num_input_off:
        yield f"{summary.num_input_off} prompts have another length than was asked for, by the server's count"
