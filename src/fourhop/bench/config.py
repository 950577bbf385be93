"""What a benchmark is told. The names are those of `vllm bench serve` where they mean the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fourhop.tokens.address import check_url, split_url

BackendName = Literal["vllm", "vllm-chat", "openai", "openai-chat", "generate"]
MetricName = Literal["ttft", "tpot", "itl", "chunk_gap", "e2el", "client_queue_time", "e2el_including_client_queue"]
LIMITED = ("ttft", "tpot", "e2el")
SEVERAL = {"consume_multiple": True}

PATHS: Mapping[BackendName, str] = {
    "vllm": "/v1/completions",
    "vllm-chat": "/v1/chat/completions",
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "generate": "/inference/v1/generate",
}


@dataclass(frozen=True)
class TargetConfig:
    """The server that is measured.

    Attributes:
        backend: Its protocol. vllm, vllm-chat: completions and chat with `return_token_ids`, so that every token is
            seen. openai, openai-chat: no extension is asked for. generate: token ids in and out, no text.
        base_url: URL of the server. Default: made of host and port.
        host: Of the server.
        port: Of the server.
        endpoint: Path of the endpoint. Default: the backend's own.
        model: Model that requests name. Default: the first of `/v1/models`.
        tokenizer: Folder or name of the model whose tokenizer makes prompts and estimates. Default: the model.
        api_key: Sent as a bearer token.
        header: More headers, each KEY=VALUE.
        extra_body: More fields of every request, as JSON.
        metrics_url: Where prefix cache hits are read; for a pipeline, one for each engine. Default: `/metrics`.
        request_id_prefix: Of the `X-Request-Id` of every request. Default: one that is drawn.
        request_timeout_s: Patience for the first byte, and then between two.
        ready_check_timeout_sec: How long to try until a first request succeeds. 0: no check.
    """

    backend: BackendName = "vllm"
    base_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    endpoint: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    api_key: str | None = field(default=None, repr=False)
    header: tuple[str, ...] = field(default=(), metadata=SEVERAL)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    metrics_url: tuple[str, ...] = field(default=(), metadata=SEVERAL)
    request_id_prefix: str | None = None
    request_timeout_s: float = 3600.0
    ready_check_timeout_sec: float = 0.0

    def __post_init__(self) -> None:
        check_url(self.root)
        for url in self.metrics_url:
            split_url(url)
        for text in self.header:
            if not text.partition("=")[1] or "\n" in text or "\r" in text:
                raise ValueError(f"a header is KEY=VALUE, not {text!r}")
        if not 0 < self.request_timeout_s < math.inf:
            raise ValueError(f"request_timeout_s must be a positive number, not {self.request_timeout_s}")
        if self.endpoint is not None and not self.endpoint.startswith("/"):
            raise ValueError(f"an endpoint is a path, not {self.endpoint}")
        wrong = [name for name, path in PATHS.items() if self.endpoint == path != PATHS[self.backend]]
        if wrong:
            raise ValueError(f"{self.endpoint} is not the protocol of --backend {self.backend}: --backend {wrong[0]}")

    @property
    def root(self) -> str:
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/")

    @property
    def url(self) -> str:
        return self.root + (self.endpoint or PATHS[self.backend])

    @property
    def metrics_urls(self) -> tuple[str, ...]:
        return self.metrics_url or (f"{self.root}/metrics",)


@dataclass(frozen=True)
class LoadConfig:
    """How many requests, and when. Open loop: a request is sent when it is due, whatever became of the others.

    Attributes:
        num_prompts: Requests; with the dataset multi_turn, conversations.
        request_rate: Requests per second on average. inf: all at once, or at a trace's own times.
        burstiness: Shape of the Gamma distribution of the intervals: 1 is Poisson, less is more bursty, inf is even.
        max_concurrency: Most requests that are open at once; more wait at the client, and their wait is reported.
        ramp_up_strategy: The rate grows from `ramp_up_start_rps` to `ramp_up_end_rps` over the requests.
        ramp_up_start_rps: Rate of the first request.
        ramp_up_end_rps: Rate of the last request.
        num_warmups: Requests before the run, with prompts of their own; they are not measured.
        seed: Everything that is drawn follows from it: prompts, lengths, arrivals.
    """

    num_prompts: int = 1000
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    num_warmups: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_prompts < 0 or self.num_warmups < 0:
            raise ValueError("num_prompts and num_warmups must not be negative")
        if not self.request_rate > 0 or not self.burstiness > 0:
            raise ValueError("request_rate and burstiness must be positive")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, not {self.max_concurrency}")
        ends = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if (self.ramp_up_strategy is None) != (ends == (None, None)) or (None in ends and ends != (None, None)):
            raise ValueError("a ramp needs ramp_up_strategy, ramp_up_start_rps and ramp_up_end_rps")
        if any(rate is not None and not 0 < rate < math.inf for rate in ends):
            raise ValueError("the rates of a ramp must be positive numbers")
        if self.ramp_up_strategy is not None and self.request_rate != math.inf:
            raise ValueError("a ramp has its own rates: leave request_rate out")


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are chosen. What is not given is not sent, and the server's default holds.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus.
        top_k: Most likely tokens that are kept.
        min_p: Least probability, as a share of the greatest.
        ignore_eos: Go on after the end token, so that lengths are exact. Default: with every dataset but sharegpt.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    ignore_eos: bool | None = None


@dataclass(frozen=True)
class MetricsConfig:
    """What is computed.

    Attributes:
        percentile_metrics: Metrics to report, by commas: ttft, tpot, itl, chunk_gap, e2el, client_queue_time,
            e2el_including_client_queue.
        metric_percentiles: Percentiles of each, by commas.
        goodput: Limits in milliseconds, each NAME:MS with the names ttft, tpot and e2el. A request that meets all of
            them is good; one with a single token has no TPOT and meets any limit on it.
    """

    percentile_metrics: str = "ttft,tpot,itl"
    metric_percentiles: str = "50,99"
    goodput: tuple[str, ...] = field(default=(), metadata=SEVERAL)

    def __post_init__(self) -> None:
        known = MetricName.__args__  # type: ignore[attr-defined]
        for name in self.metrics:
            if name not in known:
                raise ValueError(f"no metric {name!r} in percentile_metrics: there are {', '.join(known)}")
        if any(not 0 <= percent <= 100 for percent in self.percentiles):
            raise ValueError(f"metric_percentiles are 0 to 100, not {self.metric_percentiles}")
        self.limits()

    @property
    def metrics(self) -> list[str]:
        return [name.strip() for name in self.percentile_metrics.split(",") if name.strip()]

    @property
    def percentiles(self) -> list[float]:
        try:
            return [float(text) for text in self.metric_percentiles.split(",") if text.strip()]
        except ValueError:
            raise ValueError(f"metric_percentiles are numbers by commas, not {self.metric_percentiles}") from None

    def limits(self) -> dict[str, float]:
        """The limits in seconds, by metric."""
        limits: dict[str, float] = {}
        for text in self.goodput:
            name, _, value = text.partition(":")
            try:
                limits[name] = float(value) / 1000
            except ValueError:
                raise ValueError(f"a limit is NAME:MILLISECONDS, not {text!r}") from None
            if name not in LIMITED or not limits[name] > 0:
                raise ValueError(f"a limit is {', '.join(LIMITED)} with a positive number, not {text!r}")
        return limits


@dataclass(frozen=True)
class ResultConfig:
    """What is written.

    Attributes:
        save_result: Write the result as JSON, with the keys of `vllm bench serve`.
        save_detailed: With what every request gave: lengths, TTFT, ITLs, start, text, error.
        append_result: Add a line to the file instead of replacing it.
        result_dir: Folder of the file. Default: here.
        result_filename: Its name. Default: made of label, rate, model and time.
        label: Of the run.
        metadata: More keys of the result, each KEY=VALUE.
        disable_tqdm: No progress line.
    """

    save_result: bool = False
    save_detailed: bool = False
    append_result: bool = False
    result_dir: Path | None = None
    result_filename: str | None = None
    label: str | None = None
    metadata: tuple[str, ...] = field(default=(), metadata=SEVERAL)
    disable_tqdm: bool = False

    def __post_init__(self) -> None:
        for text in self.metadata:
            if "=" not in text:
                raise ValueError(f"metadata is KEY=VALUE, not {text!r}")
