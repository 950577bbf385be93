"""Whether a run met the server's prefix cache: counters of `/metrics` before and after it. The parsing is pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fourhop.tokens.connection import Session, Timeouts, call, request_headers
from fourhop.wire.errors import FourhopError

WARN_ABOVE = 0.01
SAMPLE = re.compile(r"^(vllm:prefix_cache_(queries|hits))(?:_total)?(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
TIMEOUTS = Timeouts(connect_s=2.0, first_byte_s=5.0, idle_s=5.0)


@dataclass(frozen=True)
class CacheCounts:
    """Prompt tokens that were looked up in the prefix cache, and found there, since the servers started."""

    queries: float
    hits: float

    def since(self, before: CacheCounts) -> CacheCounts:
        return CacheCounts(self.queries - before.queries, self.hits - before.hits)

    @property
    def rate(self) -> float | None:
        """The share found, None if nothing was looked up."""
        return self.hits / self.queries if self.queries > 0 else None


def parse_metrics(text: str) -> CacheCounts | None:
    """The counters in a Prometheus page, summed over their labels; None if it has none."""
    sums: dict[str, float] = {}
    for _, kind, value in SAMPLE.findall(text):
        sums[kind] = sums.get(kind, 0.0) + float(value)
    return CacheCounts(sums.get("queries", 0.0), sums.get("hits", 0.0)) if sums else None


async def read_counts(session: Session, urls: Iterable[str], api_key: str | None) -> CacheCounts | None:
    """The counters of all these pages together; None if there is one that has none, or that cannot be read."""
    queries = hits = 0.0
    for url in urls:
        try:
            async with call(session, "GET", url, timeouts=TIMEOUTS, headers=request_headers(api_key)) as answer:
                counts = parse_metrics((await answer.read_all()).decode(errors="replace"))
        except FourhopError:
            counts = None
        if counts is None:
            return None
        queries, hits = queries + counts.queries, hits + counts.hits
    return CacheCounts(queries, hits)


def cache_warning(rate: float | None, *, is_wanted: bool) -> str | None:
    """What to say of a hit rate, None if it is as it should be."""
    if rate is None or rate <= WARN_ABOVE or is_wanted:
        return None
    return (
        f"{rate:.1%} of the prompt tokens came from the prefix cache: earlier runs had the same prompts. "
        "Give another --seed, or start the server with --no-enable-prefix-caching"
    )
