"""What an error says of the engine that it came from, and how long a failing engine is left alone. Pure."""

from __future__ import annotations

from enum import Enum, auto

from fourhop.wire.errors import EnginesDisagree, FourhopError, TransferError

FIRST_BACKOFF_S = 0.25

NOT_IMPLEMENTED = 501
"""What a vLLM says of a request for something that its model cannot do: the engine is well."""


class Verdict(Enum):
    """What an error says of the engine that it came from."""

    REQUEST = auto()  # the request is wrong: the engine is well, another would say the same
    BUSY = auto()  # back-pressure: well, but not now
    TRANSFER = auto()  # KV did not arrive: the engine can still compute it
    FLEET = auto()  # two engines disagree: no third one can settle which is right
    FAULT = auto()  # the engine failed, or the way to it


def judge(error: FourhopError) -> Verdict:
    if error.type == TransferError.type:
        return Verdict.TRANSFER
    if error.type == EnginesDisagree.type:
        return Verdict.FLEET
    if error.status in (429, 503):
        return Verdict.BUSY
    return Verdict.REQUEST if error.status < 500 or error.status == NOT_IMPLEMENTED else Verdict.FAULT


def backoff_s(num_faults: int, longest_s: float) -> float:
    """How long to leave an engine alone after so many faults without a success between them."""
    return min(longest_s, FIRST_BACKOFF_S * 2.0 ** min(num_faults - 1, 16)) if num_faults else 0.0
