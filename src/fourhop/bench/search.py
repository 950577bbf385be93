"""Which request rate to try next, and what the tried ones say about goodput. Pure.

Three definitions of goodput are told apart:

- ours and DistServe's (OSDI 2024, section 2): the greatest tried rate at which at least 90 % of the requests meet every
  limit;
- vLLM's (`request_goodput`): requests per second that meet every limit, here the best of the tried rates, as the post
  that measured three A100 counts it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

ATTAINMENT = 0.9


@dataclass(frozen=True)
class SweepConfig:
    """Which rates are tried.

    Attributes:
        request_rates: Rates to try, by commas, all of them. Default: steps until a rate fails, then between the last
            that passed and the first that failed.
        start_rate: First rate of the steps.
        rate_factor: From one step to the next.
        max_points: Most rates that are tried.
        num_refinements: Rates tried between the last that passed and the first that failed.
        attainment: Share of the requests that must meet every limit for a rate to pass.
        seconds: Length of a point; it sets how many requests it has. Default: num_prompts requests at every rate.
    """

    request_rates: str | None = None
    start_rate: float = 0.1
    rate_factor: float = 1.5
    max_points: int = 12
    num_refinements: int = 2
    attainment: float = ATTAINMENT
    seconds: float | None = None

    def __post_init__(self) -> None:
        if not self.start_rate > 0 or not self.rate_factor > 1:
            raise ValueError("start_rate must be positive and rate_factor more than 1")
        if not 0 < self.attainment <= 1:
            raise ValueError(f"attainment must be more than 0 and at most 1, not {self.attainment}")
        if self.max_points < 1 or self.num_refinements < 0:
            raise ValueError("max_points must be at least 1 and num_refinements not negative")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds must be a positive number, not {self.seconds}")
        if any(not 0 < rate < math.inf for rate in self.rates):
            raise ValueError(f"request_rates are positive numbers by commas, not {self.request_rates}")

    @property
    def rates(self) -> list[float]:
        try:
            return [float(text) for text in (self.request_rates or "").split(",") if text.strip()]
        except ValueError:
            raise ValueError(f"request_rates are positive numbers by commas, not {self.request_rates}") from None


@dataclass(frozen=True)
class Tried:
    """A rate, the share of its requests that met every limit, and how many of them did in a second."""

    rate: float
    good_share: float | None
    goodput: float | None

    def passes(self, attainment: float) -> bool:
        return self.good_share is not None and self.good_share >= attainment


def next_rate(tried: Sequence[Tried], config: SweepConfig) -> float | None:
    """The rate to try after these, in the order in which they were tried; None when it is enough."""
    if config.rates:
        return config.rates[len(tried)] if len(tried) < len(config.rates) else None
    if not tried:
        return config.start_rate
    if len(tried) >= config.max_points:
        return None
    failed = [one.rate for one in tried if not one.passes(config.attainment)]
    passed = [one.rate for one in tried if one.passes(config.attainment) and one.rate < min(failed, default=math.inf)]
    if not failed:
        return max(passed) * config.rate_factor
    if not passed:
        return min(failed) / config.rate_factor
    # Every point after both sides were there lies between them.
    num_refined = len(tried) - 1 - max(_first(tried, config, passes=True), _first(tried, config, passes=False))
    return math.sqrt(max(passed) * min(failed)) if num_refined < config.num_refinements else None


def _first(tried: Sequence[Tried], config: SweepConfig, *, passes: bool) -> int:
    return next(place for place, one in enumerate(tried) if one.passes(config.attainment) is passes)


def distserve_goodput(tried: Sequence[Tried], attainment: float = ATTAINMENT) -> float | None:
    """The greatest rate that passed; None if none did."""
    return max((one.rate for one in tried if one.passes(attainment)), default=None)


def vllm_goodput(tried: Sequence[Tried]) -> float | None:
    """The most requests inside the limits in a second, at any of the rates."""
    return max((one.goodput for one in tried if one.goodput is not None), default=None)


def failing_rate(tried: Sequence[Tried], attainment: float = ATTAINMENT) -> float | None:
    """The least rate that failed; None if none did."""
    return min((one.rate for one in tried if not one.passes(attainment)), default=None)


def seed_of(seed: int, *key: object) -> int:
    """A seed for a point of a sweep: prompts of two points share nothing that a cache could keep."""
    return Random("/".join(str(part) for part in (seed, *key))).randrange(1 << 31)


def num_prompts_of(rate: float, seconds: float | None, num_prompts: int) -> int:
    """How many requests a point has: as many as `seconds` take at this rate, or `num_prompts`."""
    return num_prompts if seconds is None else max(1, math.ceil(rate * seconds))
