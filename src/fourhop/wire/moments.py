"""The moments of a request, named once. Logs, metrics, `Server-Timing`, bench columns and the planner use these words.

Times are seconds on one process's monotonic clock; a remote hop reports its own moments as durations since it
received the request, so clocks of different machines are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from operator import itemgetter
from typing import NamedTuple


class Moment(StrEnum):
    RECEIVED = "received"
    RENDERED = "rendered"
    ADMITTED = "admitted"
    PLACED = "placed"
    PREFILL_STARTED = "prefill_started"
    PREFILL_DONE = "prefill_done"
    FIRST_TOKEN = "first_token"
    KV_REQUESTED = "kv_requested"
    KV_READY = "kv_ready"
    DECODE_STARTED = "decode_started"
    LAST_TOKEN = "last_token"
    FINISHED = "finished"


RECEIVED = Moment.RECEIVED.value

INTERVALS: dict[Moment, str] = {
    Moment.RENDERED: "render",
    Moment.ADMITTED: "queue",
    Moment.PLACED: "placement",
    Moment.PREFILL_STARTED: "prefill_wait",
    Moment.PREFILL_DONE: "prefill",
    Moment.FIRST_TOKEN: "first_token",
    Moment.KV_REQUESTED: "transfer_wait",
    Moment.KV_READY: "transfer",
    Moment.DECODE_STARTED: "decode_wait",
    Moment.LAST_TOKEN: "decode",
    Moment.FINISHED: "finish",
}
"""What a request did until a moment, named once."""


class Interval(NamedTuple):
    name: str
    begin_s: float
    end_s: float


def intervals(at_s: Mapping[str, float]) -> list[Interval]:
    """What a request did between its moments. Each interval begins with the nearest moment before its end, in the order
    of a request's life, that had come by then: so they follow one another, but where KV travels while the prompt is
    still computed two overlap. Some of them, end to end, fill the time from the first moment to the last.
    """
    told: list[Interval] = []
    past: list[float] = []
    for moment in Moment:
        end_s = at_s.get(moment)
        if end_s is None:
            continue
        begin_s = next((begin_s for begin_s in reversed(past) if begin_s <= end_s), None)
        if begin_s is not None:
            told.append(Interval(INTERVALS[moment], begin_s, end_s))
        past.append(end_s)
    return told


class Timeline:
    """When each moment of one request happened. The first time a moment is marked counts."""

    def __init__(self, received_s: float) -> None:
        self.at_s: dict[str, float] = {RECEIVED: received_s}

    def mark(self, moment: Moment, now_s: float) -> None:
        self.at_s.setdefault(moment.value, now_s)

    def merge(self, hop: dict[str, float], origin_s: float) -> None:
        """Add a hop's moments, given in seconds after the hop received the request at `origin_s` of this clock."""
        for name, after_s in hop.items():
            if name != RECEIVED:
                self.at_s.setdefault(name, origin_s + after_s)

    def since_received(self) -> dict[str, float]:
        """Seconds after `received`, in the order in which the moments happened."""
        start = self.at_s[RECEIVED]
        return {name: at - start for name, at in sorted(self.at_s.items(), key=itemgetter(1))}


def server_timing(since_received: dict[str, float]) -> str:
    """The moments as a `Server-Timing` header value, durations in milliseconds (W3C Server Timing)."""
    return ", ".join(f"{name};dur={seconds * 1000:.1f}" for name, seconds in since_received.items())
