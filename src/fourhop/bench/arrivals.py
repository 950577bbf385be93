"""When requests are due: a schedule from a rate and a seed. Pure.

Intervals are Gamma(shape = burstiness, scale = 1 / (rate x burstiness)), so that burstiness 1 is a Poisson process.
As in `vllm bench serve` the times are then stretched so that the last one is exactly number / rate: what was drawn
decides the pattern, never the average load.
"""

from __future__ import annotations

import math
from itertools import accumulate
from random import Random

from fourhop.bench.config import LoadConfig


def schedule(load: LoadConfig, num: int) -> list[float]:
    """Seconds after the start at which each of `num` requests is due, in order."""
    if load.ramp_up_strategy is None and math.isinf(load.request_rate):
        return [0.0] * num
    drawn = Random(f"{load.seed}/arrivals")
    due = list(accumulate(_interval(drawn, _rate(load, place, num), load.burstiness) for place in range(num)))
    if load.ramp_up_strategy is not None or not due or due[-1] == 0:
        return due
    stretch = num / load.request_rate / due[-1]
    return [at_s * stretch for at_s in due]


def _interval(drawn: Random, rate: float, burstiness: float) -> float:
    if math.isinf(burstiness):
        return 1 / rate
    return drawn.gammavariate(burstiness, 1 / (rate * burstiness))


def _rate(load: LoadConfig, place: int, num: int) -> float:
    """The rate at the request in this place: constant, or on its way up the ramp."""
    if load.ramp_up_start_rps is None or load.ramp_up_end_rps is None:
        return load.request_rate
    share = place / max(1, num - 1)
    if load.ramp_up_strategy == "linear":
        return load.ramp_up_start_rps + share * (load.ramp_up_end_rps - load.ramp_up_start_rps)
    return float(load.ramp_up_start_rps * (load.ramp_up_end_rps / load.ramp_up_start_rps) ** share)
