"""Records of `bench` as runs leave them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fourhop.bench.config import LoadConfig, MetricsConfig, TargetConfig
from fourhop.bench.measure import summarize
from fourhop.bench.record import Record
from fourhop.bench.result import Result

METRICS = MetricsConfig(goodput=("ttft:2000", "tpot:30"), metric_percentiles="50,99,99.9")


def record(sent_s: float, *at_s: float, num: Sequence[int] = (), due_s: float | None = None) -> Record:
    """A success with a chunk at each of these times."""
    tokens = array("L", num or [1] * len(at_s))
    return Record(
        name="r",
        due_s=sent_s if due_s is None else due_s,
        ready_s=sent_s,
        sent_s=sent_s,
        end_s=at_s[-1],
        num_output=sum(tokens),
        chunk_at_s=array("d", at_s),
        chunk_tokens=tokens,
    )


def good() -> Record:
    return record(0.0, 0.1, 0.14, 0.18, num=[1, 4, 4])


def bad() -> Record:
    return Record(name="r-1", due_s=0.0, ready_s=0.0, sent_s=0.0, end_s=1.0, error="500 broken")


def result_of(records: Sequence[Record], *, is_cut: bool = False, **load: Any) -> Result:
    summary = summarize(records, 2.0, limits=METRICS.limits(), metrics=METRICS.metrics, percentiles=METRICS.percentiles)
    return Result(
        target=TargetConfig(),
        load=LoadConfig(num_prompts=2, **load),
        model="org/m",
        tokenizer="org/m",
        date=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        summary=summary,
        records=records,
        hops={"rendered": 0.002},
        cache_hit_rate=0.5,
        warnings=["the cache was warm"],
        is_cut=is_cut,
    )
