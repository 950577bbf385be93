"""Records of `bench` as runs leave them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from fourhop.bench.record import Record


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
