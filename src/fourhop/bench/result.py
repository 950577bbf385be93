"""A run's result: the JSON of `vllm bench serve` and what we add to it, and the table that is printed. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fourhop.bench.config import LoadConfig, MetricsConfig, ResultConfig, TargetConfig
from fourhop.bench.measure import Distribution, Summary
from fourhop.bench.record import Record

TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "chunk_gap": "Gap between Chunks",
    "e2el": "End-to-end Latency",
    "client_queue_time": "Client Queue Time",
    "e2el_including_client_queue": "End-to-end Latency, Client Queue included",
}
WIDTH = 58


@dataclass(frozen=True, kw_only=True)
class Result:
    """All that is known of one run. `warnings` say what makes its numbers doubtful."""

    target: TargetConfig
    load: LoadConfig
    model: str
    tokenizer: str
    date: datetime
    summary: Summary
    records: Sequence[Record]
    hops: Mapping[str, float]
    cache_hit_rate: float | None
    warnings: Sequence[str]
    is_cut: bool

    @property
    def is_success(self) -> bool:
        return self.summary.completed > 0


def as_json(result: Result, metrics: MetricsConfig, config: ResultConfig) -> dict[str, Any]:
    """Keys and units of `vllm bench serve` (times in ms), then ours. Numbers that are not known are null."""
    load, summary = result.load, result.summary
    known = {
        "date": f"{result.date:%Y%m%d-%H%M%S}",
        "endpoint_type": result.target.backend,
        "backend": result.target.backend,
        "label": config.label,
        "model_id": result.model,
        "tokenizer_id": result.tokenizer,
        "num_prompts": load.num_prompts,
        **dict(text.split("=", 1) for text in config.metadata),
        "request_rate": load.request_rate if load.request_rate < math.inf else "inf",
        "burstiness": load.burstiness if load.burstiness < math.inf else "inf",
        "max_concurrency": load.max_concurrency,
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.num_input,
        "total_output_tokens": summary.num_output,
        "request_throughput": summary.request_rate,
        "request_goodput": summary.goodput,
        "output_throughput": summary.output_rate,
        "total_token_throughput": summary.total_rate,
        "max_output_tokens_per_s": summary.peak_output_per_s,
        "max_concurrent_requests": summary.peak_open,
        "rtfx": 0.0,
    }
    for name, values in summary.metrics.items():
        known |= _flat(name, values)
    return known | _ours(result, metrics) | (_detailed(result) if config.save_detailed else {})


def _flat(name: str, values: Distribution) -> dict[str, float | None]:
    ours = {
        f"mean_{name}_ms": _ms(values.mean),
        f"median_{name}_ms": _ms(values.median),
        f"std_{name}_ms": _ms(values.std),
        f"max_{name}_ms": _ms(values.worst),
    }
    return ours | {f"p{percent:g}_{name}_ms": _ms(value) for percent, value in values.percentiles.items()}


def _ours(result: Result, metrics: MetricsConfig) -> dict[str, Any]:
    summary = result.summary
    return {
        "cancelled": summary.cancelled,
        "interrupted": result.is_cut,
        "failures": summary.failures,
        "seed": result.load.seed,
        "goodput_limits_ms": {name: limit * 1000 for name, limit in metrics.limits().items()},
        "good_share": summary.good_share,
        "client_lag_ms": {"median": _ms(summary.lag.median), "max": _ms(summary.lag.worst)},
        "cached_input_tokens": summary.num_cached,
        "prefix_cache_hit_rate": result.cache_hit_rate,
        "token_count_sources": summary.sources,
        "token_count_mismatches": summary.num_mismatched,
        "input_length_differs": summary.num_input_off,
        "itl_unknown_requests": summary.itl_unknown,
        "median_ttft_by_turn_ms": {str(turn): _ms(one.median) for turn, one in summary.ttft_by_turn.items()},
        "median_ttft_hops_ms": {name: _ms(seconds) for name, seconds in result.hops.items()},
        "warnings": list(result.warnings),
    }


def _detailed(result: Result) -> dict[str, Any]:
    """Lists with an entry for each request, failures among them, in the order in which requests were sent."""
    records = sorted(result.records, key=lambda record: record.sent_s)
    return {
        "input_lens": [record.num_input for record in records],
        "output_lens": [record.num_output if record.is_good else 0 for record in records],
        "ttfts": [record.ttft_s if record.is_good else 0.0 for record in records],
        "itls": [(record.itls_s() or []) if record.is_good else [] for record in records],
        "chunk_gaps": [record.chunk_gaps_s() for record in records],
        "latencies": [record.e2el_s for record in records],
        "client_queue_times": [record.queue_s for record in records],
        "client_lags": [record.lag_s for record in records],
        "start_times": [record.sent_s for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error or "" for record in records],
        "request_ids": [record.name for record in records],
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def file_name(result: Result, config: ResultConfig) -> str:
    """`{label}-{rate}qps[-concurrency{N}]-{model}-{time}.json`, as vLLM names it."""
    if config.result_filename is not None:
        return config.result_filename
    limit = result.load.max_concurrency
    middle = "" if limit is None else f"-concurrency{limit}"
    model = result.model.rstrip("/").rpartition("/")[2]
    label = config.label or result.target.backend
    return f"{label}-{result.load.request_rate}qps{middle}-{model}-{result.date:%Y%m%d-%H%M%S}.json"


def as_table(result: Result, metrics: MetricsConfig) -> str:
    """What is printed, with vLLM's rows."""
    summary = result.summary
    lines = [" Serving Benchmark Result ".center(WIDTH, "="), *_rows(_totals(result, metrics))]
    for name, values in summary.metrics.items():
        lines += [TITLES[name].center(WIDTH, "-"), *_rows(_spread(name, values))]
    if len(summary.ttft_by_turn) > 1:
        lines.append("Median TTFT by Turn".center(WIDTH, "-"))
        lines += _rows([(f"Turn {turn + 1} (ms):", _ms(one.median)) for turn, one in summary.ttft_by_turn.items()])
    if result.hops:
        lines.append("Median TTFT by Hop".center(WIDTH, "-"))
        lines += _rows([(f"{name} (ms):", _ms(seconds)) for name, seconds in result.hops.items()])
    lines.append("=" * WIDTH)
    lines += [f"failed, {num} times: {cause}" for cause, num in summary.failures.items()]
    lines += [f"warning: {text}" for text in result.warnings]
    return "\n".join(lines)


def _totals(result: Result, metrics: MetricsConfig) -> list[tuple[str, float | str | None]]:
    summary, load = result.summary, result.load
    rows: list[tuple[str, float | str | None]] = [
        ("Successful requests:", summary.completed),
        ("Failed requests:", summary.failed),
        *([("Cancelled requests:", summary.cancelled)] if summary.cancelled else []),
        *([("Maximum request concurrency:", load.max_concurrency)] if load.max_concurrency else []),
        *([("Request rate configured (RPS):", load.request_rate)] if load.request_rate < math.inf else []),
        ("Benchmark duration (s):", summary.duration_s),
        ("Total input tokens:", summary.num_input),
        ("Total generated tokens:", summary.num_output),
        ("Request throughput (req/s):", summary.request_rate),
    ]
    if metrics.limits():
        rows.append(("Request goodput (req/s):", summary.goodput))
        rows.append(("Inside the limits (%):", None if summary.good_share is None else summary.good_share * 100))
    return [
        *rows,
        ("Output token throughput (tok/s):", summary.output_rate),
        ("Peak output token throughput (tok/s):", summary.peak_output_per_s),
        ("Peak concurrent requests:", summary.peak_open),
        ("Total token throughput (tok/s):", summary.total_rate),
        ("Client lag, median (ms):", _ms(summary.lag.median)),
        ("Client lag, worst (ms):", _ms(summary.lag.worst)),
        ("Prefix cache hit rate (%):", None if result.cache_hit_rate is None else result.cache_hit_rate * 100),
    ]


def _spread(name: str, values: Distribution) -> list[tuple[str, float | str | None]]:
    short = name.upper()
    percentiles = [(f"P{percent:g} {short} (ms):", _ms(value)) for percent, value in values.percentiles.items()]
    rows: list[tuple[str, float | str | None]] = [
        (f"Mean {short} (ms):", _ms(values.mean)),
        (f"Median {short} (ms):", _ms(values.median)),
    ]
    return [*rows, *((title, value) for title, value in percentiles if not title.startswith("P50 "))]


def _rows(rows: Sequence[tuple[str, float | str | None]]) -> list[str]:
    return [f"{title:<42}{_shown(value):>16}" for title, value in rows]


def _shown(value: float | str | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
