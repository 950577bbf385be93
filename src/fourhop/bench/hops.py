"""Where the time to the first token went, from the server's `Server-Timing`. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable

from fourhop.bench.record import Record
from fourhop.wire.moments import Moment

NAMES = [moment.value for moment in Moment]
ENTRY = re.compile(r"\s*([!#$%&'*+\-.^_`|~0-9A-Za-z]+)\s*(?:;\s*[^,]*?\bdur\s*=\s*([0-9.]+))?[^,]*")


def parse_server_timing(header: str) -> dict[str, float]:
    """The durations of a `Server-Timing` header (W3C), in seconds, those of our moments only."""
    moments: dict[str, float] = {}
    for entry in header.split(","):
        match = ENTRY.fullmatch(entry)
        if match and match[2] and match[1] in NAMES and match[2].count(".") <= 1:
            moments[match[1]] = float(match[2]) / 1000
    return moments


def hops_of(record: Record) -> dict[str, float]:
    """Seconds up to each moment since the one before, in order; the last, `network`, is what the server did not see.

    Moments after the first token are left out. Empty if the server told none.
    """
    first_s = record.moments.get(Moment.FIRST_TOKEN)
    told = sorted(record.moments.items(), key=lambda item: item[1])
    within = [(name, at_s) for name, at_s in told if first_s is None or at_s <= first_s]
    hops, before_s = {}, 0.0
    for name, at_s in within:
        if name != Moment.RECEIVED:
            hops[name], before_s = at_s - before_s, at_s
    return {**hops, "network": record.ttft_s - before_s} if hops else {}


def median_hops(records: Iterable[Record]) -> dict[str, float]:
    """The median of each hop over the successes that have it, in seconds."""
    gathered: dict[str, list[float]] = {}
    for record in records:
        for name, seconds in hops_of(record).items():
            gathered.setdefault(name, []).append(seconds)
    return {name: statistics.median(values) for name, values in sorted(gathered.items(), key=_place)}


def _place(item: tuple[str, list[float]]) -> int:
    return NAMES.index(item[0]) if item[0] in NAMES else len(NAMES)
