"""What is claimed of splitting, as ratios out of one comparison. Pure.

A split is held against the strongest replicas at each claim: against those with the best chunk budget, except where
the claim itself says "default budget".

A prompt interrupts each stream once for every step that it is computed in. Below about half of the capacity of two
engines that is less than one token in a hundred (prompts per second and engine, times the seconds of a token), so the
99th percentile does not see it: `worst_itl_ratio`, which has no bar, is told beside it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fourhop.bench.findings import Findings, best, ratio
from fourhop.bench.search import ATTAINMENT
from fourhop.bench.setups import Setup

NUM_PREFILLS = 4.0
TPOT_FACTOR = 2.0
QUIET_SHARE = 0.2
"""Of what prefill does unloaded. Beside decodes a prompt takes up to 1.5 times as long, so this keeps it 30 % busy."""


@dataclass(frozen=True)
class Calibration:
    """What one request alone takes on the split, and how many requests a second the replicas do at most."""

    ttft_s: float
    tpot_s: float
    capacity: float

    def limits(self) -> tuple[str, ...]:
        """Limits as the posts choose them: a few prefills for TTFT, twice the unloaded TPOT."""
        ttft_ms, tpot_ms = self.ttft_s * NUM_PREFILLS * 1000, self.tpot_s * TPOT_FACTOR * 1000
        return (f"ttft:{ttft_ms:.0f}", f"tpot:{tpot_ms:.1f}")


@dataclass(frozen=True)
class Rates:
    """Request rates of a comparison, and what each is for."""

    quiet: float
    """Keeps the prefill engine at most 30 % busy."""
    middle: tuple[float, ...]
    """40 to 60 % of the replicas' capacity."""
    more: tuple[float, ...] = ()
    """More rates, at which goodput is looked for."""

    def all(self) -> list[float]:
        return sorted({self.quiet, *self.middle, *self.more})


def plan_rates(calibration: Calibration, fractions: Iterable[float]) -> Rates:
    """`fractions` of the capacity; three digits each, so that they read well."""
    at = [_rounded(calibration.capacity * fraction) for fraction in fractions]
    middle = tuple(_rounded(calibration.capacity * fraction) for fraction in (0.4, 0.5, 0.6))
    return Rates(_rounded(QUIET_SHARE / calibration.ttft_s), middle, tuple(at))


def claims_of(findings: Findings, rates: Rates) -> dict[str, float | None]:
    """The ratios, None where what they need was not measured. Over several rates: the median of their ratios."""
    whole = [setup for setup in findings.setups if setup.kind == "replicas"]
    default = [setup for setup in whole if setup.budget is None]
    split = [setup for setup in findings.setups if setup.kind == "split"]
    auto = [setup for setup in findings.setups if setup.kind == "other"]

    def least(setups: Sequence[Setup], rate: float, value: str) -> float | None:
        return best((findings.cell(setup, rate, value).median for setup in setups), min)

    def over(above: Sequence[Setup], below: Sequence[Setup], value: str, at: Iterable[float]) -> float | None:
        return _median(ratio(least(above, rate, value), least(below, rate, value)) for rate in at)

    busy = (max(rates.middle),)
    return {
        "p99_itl_ratio": over(default, split, "itl_p99", rates.middle),
        "p99_itl_ratio_tuned": over(whole, split, "itl_p99", rates.middle),
        "worst_itl_ratio": over(default, split, "itl_worst", rates.middle),
        "median_itl_ratio": over(default, split, "itl_p50", rates.middle),
        "split_worst_itl_over_median": _median(
            ratio(least(split, rate, "itl_worst"), least(split, rate, "itl_p50")) for rate in rates.middle
        ),
        "goodput_ratio": ratio(_goodput(findings, split, 1), _goodput(findings, whole, 1)),
        "goodput_ratio_distserve": ratio(_goodput(findings, split, 0), _goodput(findings, whole, 0)),
        "ttft_ratio": over(split, whole, "ttft_p50", (rates.quiet,)),
        "auto_ttft_ratio": over(auto, whole, "ttft_p50", busy),
        "auto_p99_itl_ratio": over(default, auto, "itl_p99", busy),
        "auto_goodput_ratio": ratio(_goodput(findings, auto, 1), _goodput(findings, whole, 1)),
        "auto_goodput_ratio_distserve": ratio(_goodput(findings, auto, 0), _goodput(findings, whole, 0)),
    }


BARS: Mapping[str, tuple[str, float]] = {
    "p99_itl_ratio": (">=", 10.0),
    "p99_itl_ratio_tuned": (">=", 3.0),
    "split_worst_itl_over_median": ("<=", 3.0),
    "goodput_ratio": (">=", 1.31),
    "ttft_ratio": ("<=", 1.1),
    "auto_ttft_ratio": ("<=", 1.5),
    "auto_p99_itl_ratio": (">=", 3.0),
}
"""What must be reached."""


def is_reached(name: str, value: float | None) -> bool | None:
    """Whether a claim holds; None if it was not measured or has no bar."""
    if value is None or name not in BARS:
        return None
    sign, bar = BARS[name]
    return value >= bar if sign == ">=" else value <= bar


def _goodput(findings: Findings, setups: Sequence[Setup], definition: int) -> float | None:
    """The best of the set-ups, by DistServe's definition (0) or by vLLM's and the A100 post's (1)."""
    return best((findings.goodputs(setup, ATTAINMENT)[definition] for setup in setups), max)


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _rounded(rate: float) -> float:
    return round(rate, 2 - math.floor(math.log10(rate)))
