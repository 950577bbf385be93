"""Records become numbers: distributions, rates, goodput. Pure.

Only successes are in the distributions and the token counts; failures are counted by their cause. Rates are per second
of the whole run. A number that has nothing behind it is None, never 0 or NaN.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from fourhop.bench.client import CANCELLED
from fourhop.bench.record import Record, Source


@dataclass(frozen=True)
class Distribution:
    """Of one metric, in seconds: a number each, or None where there is no value."""

    num: int
    mean: float | None
    median: float | None
    std: float | None
    worst: float | None
    percentiles: Mapping[float, float | None]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run in numbers. Times are seconds, rates per second.

    `good_share` is the share of all requests that ended, failures among them, which met the limits; `goodput` those
    per second, as vLLM counts it. `itl_unknown` are successes whose tokens cannot be told apart in their chunks.
    `num_mismatched` are those whose ids and usage disagree, `num_input_off` those whose prompt had another length than
    was asked for.
    """

    duration_s: float
    completed: int
    failed: int
    cancelled: int
    failures: Mapping[str, int]
    num_input: int
    num_output: int
    num_cached: int | None
    request_rate: float | None
    output_rate: float | None
    total_rate: float | None
    goodput: float | None
    good_share: float | None
    peak_output_per_s: float | None
    peak_open: int
    metrics: Mapping[str, Distribution]
    lag: Distribution
    sources: Mapping[Source, int]
    num_mismatched: int
    num_input_off: int
    itl_unknown: int
    ttft_by_turn: Mapping[int, Distribution]


def summarize(
    records: Sequence[Record],
    duration_s: float,
    *,
    limits: Mapping[str, float],
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> Summary:
    """The numbers of a run of this length. `limits` are in seconds, by metric; without any there is no goodput."""
    good = [record for record in records if record.is_good]
    bad = [record for record in records if not record.is_good and record.error != CANCELLED]
    num_ended = len(good) + len(bad)
    num_met = sum(record.meets(limits) for record in good)
    num_input, num_output = sum(one.num_input for one in good), sum(one.num_output for one in good)
    cached = [record.num_cached for record in good if record.num_cached is not None]

    def per_s(num: int) -> float | None:
        return num / duration_s if duration_s > 0 else None

    return Summary(
        duration_s=duration_s,
        completed=len(good),
        failed=len(bad),
        cancelled=len(records) - num_ended,
        failures=dict(Counter(record.error or "" for record in bad).most_common()),
        num_input=num_input,
        num_output=num_output,
        num_cached=sum(cached) if cached else None,
        request_rate=per_s(len(good)),
        output_rate=per_s(num_output),
        total_rate=per_s(num_input + num_output),
        goodput=per_s(num_met) if limits else None,
        good_share=num_met / num_ended if limits and num_ended else None,
        peak_output_per_s=peak_rate(good),
        peak_open=peak_open(records),
        metrics={name: distribution(values_of(name, good), percentiles) for name in metrics},
        lag=distribution((record.lag_s for record in records), percentiles),
        sources=dict(Counter(record.source for record in good)),
        num_mismatched=sum(record.disagrees for record in good),
        num_input_off=sum(record.num_input != record.num_asked for record in good),
        itl_unknown=sum(record.chunk_tokens is None for record in good),
        ttft_by_turn={
            turn: distribution((one.ttft_s for one in good if one.turn == turn), percentiles)
            for turn in sorted({record.turn for record in good})
        },
    )


def values_of(name: str, good: Iterable[Record]) -> Iterable[float]:
    """The values of a metric in seconds, over successes; a request may have none or many."""
    return chain.from_iterable(VALUES[name](record) for record in good)


VALUES: Mapping[str, Callable[[Record], Sequence[float]]] = {
    "ttft": lambda record: (record.ttft_s,),
    "tpot": lambda record: () if record.tpot_s is None else (record.tpot_s,),
    "itl": lambda record: record.itls_s() or (),
    "chunk_gap": lambda record: record.chunk_gaps_s(),
    "e2el": lambda record: (record.e2el_s,),
    "client_queue_time": lambda record: (record.queue_s,),
    "e2el_including_client_queue": lambda record: (record.queue_s + record.e2el_s,),
}


def distribution(values: Iterable[float], percentiles: Sequence[float]) -> Distribution:
    """Of values in any order; kept as eight bytes each while it is made."""
    found = array("d", values)
    if not found:
        return Distribution(0, None, None, None, None, dict.fromkeys(percentiles))
    ordered = array("d", sorted(found))
    mean = math.fsum(ordered) / len(ordered)
    return Distribution(
        num=len(ordered),
        mean=mean,
        median=percentile(ordered, 50),
        std=math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)),
        worst=ordered[-1],
        percentiles={percent: percentile(ordered, percent) for percent in percentiles},
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """By linear interpolation between the closest ranks, as numpy's default does. `ordered` is not empty."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def peak_rate(good: Sequence[Record]) -> float | None:
    """The most tokens that arrived within one second, over seconds counted from the first token.

    A request whose chunks are of unknown sizes has its tokens spread over them evenly.
    """
    origin_s = min((record.chunk_at_s[0] for record in good), default=0.0)
    per_second: dict[int, float] = {}
    for record in good:
        each = record.num_output / len(record.chunk_at_s)
        for place, at_s in enumerate(record.chunk_at_s):
            second = math.floor(at_s - origin_s)
            num = each if record.chunk_tokens is None else record.chunk_tokens[place]
            per_second[second] = per_second.get(second, 0.0) + num
    return max(per_second.values(), default=None)


def peak_open(records: Iterable[Record]) -> int:
    """The most requests that were open at one time."""
    changes = sorted(change for one in records for change in ((one.sent_s, 1), (one.end_s, -1)))
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
