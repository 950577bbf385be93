"""Trace context between hops: the `traceparent` header (W3C Trace Context, version 00)."""

from __future__ import annotations

import re
from typing import NamedTuple

HEADER = "traceparent"

_VALUE = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1


class TraceContext(NamedTuple):
    """The span that a request belongs to. `is_sampled`: whoever began the trace wants it recorded."""

    trace_id: int
    span_id: int
    is_sampled: bool = True

    @property
    def header(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


def parse_traceparent(value: str | None) -> TraceContext | None:
    """None for no value and for one that is not valid, which the standard says to read over."""
    match = None if value is None else _VALUE.fullmatch(value)
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    return TraceContext(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED)) if trace_id and span_id else None
