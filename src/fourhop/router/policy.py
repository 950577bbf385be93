"""Where a request goes: a pure choice among the engines that are alive."""

from __future__ import annotations

from collections.abc import Container, Sequence
from enum import StrEnum
from typing import Literal

import msgspec

EngineRole = Literal["prefill", "decode"]

PREFERENCE_LOAD = 4
"""Requests that an engine may be busier than the idlest, and still be preferred for what it holds."""


UNEVEN_LOAD = 2
"""Requests that one side may have more than the other before anything is known of either."""


class Reason(StrEnum):
    """Why a request runs the way it does. A word of the log line and a label of a metric."""

    SPLIT = "split"
    ONE_TOKEN = "one_token"
    NO_PREFILL = "no_prefill"
    NO_DECODE = "no_decode"
    NO_PAIR = "no_pair"
    CONTINUED = "continued"
    LOCAL = "local"
    SHORT_PROMPT = "short_prompt"
    PREFIX_HIT = "prefix_hit"
    PREFILL_BUSY = "prefill_busy"
    DECODE_IDLE = "decode_idle"
    NO_HARM = "no_harm"
    DECODE_BUSY = "decode_busy"


class Candidate(msgspec.Struct, frozen=True):
    """An engine that may be picked. `load` is what it is doing for us; `num_placed` all that it was ever given.

    `exchange` names what two engines must share to hand KV over; None if this one cannot hand over at all.
    """

    name: str
    role: EngineRole
    load: int
    num_placed: int = 0
    exchange: str | None = None


class Placement(msgspec.Struct, frozen=True):
    """The engine that a request starts on. For a split it prefills there and decodes on one with that `exchange`.

    `ttft_s` and `itl_s` are what was predicted, where the choice came from a prediction.
    """

    engine: str
    reason: Reason
    ttft_s: float | None = None
    itl_s: float | None = None

    @property
    def is_split(self) -> bool:
        return self.reason is Reason.SPLIT


def least_loaded(candidates: Sequence[Candidate], prefer: Container[str] = ()) -> Candidate | None:
    """The one with the least to do; among equals the one that was given the least so far, then the first by name.

    Those named by `prefer` have something that the others lack: one of them is chosen unless all are much busier.
    """
    least = min(candidates, key=_business, default=None)
    wanted = min((one for one in candidates if one.name in prefer), key=_business, default=None)
    if least is None or wanted is None:
        return least
    return wanted if wanted.load <= least.load + PREFERENCE_LOAD else least


def _business(one: Candidate) -> tuple[int, int, str]:
    return (one.load, one.num_placed, one.name)


def place(
    candidates: Sequence[Candidate], *, wants_split: bool, max_tokens: int | None, prefer: Container[str] = ()
) -> Placement | None:
    """Where a new request starts; None if there is nowhere. `prefer` names engines that know its beginning.

    It is split over a prefill and a decode engine that can exchange KV. Any engine can also do the whole of it, and
    does when the other side is missing, when no pair matches, or when one token is all that is asked for.
    """
    prefill = [one for one in candidates if one.role == "prefill"]
    decode = [one for one in candidates if one.role == "decode"]
    if not wants_split:
        return place_whole(decode or prefill, Reason.CONTINUED, prefer)
    if max_tokens == 1 and prefill:
        return place_whole(prefill, Reason.ONE_TOKEN, prefer)
    if not decode:
        return place_whole(prefill, Reason.NO_DECODE, prefer)
    if not prefill:
        return place_whole(decode, Reason.NO_PREFILL, prefer)
    exchanges = {one.exchange for one in decode if one.exchange is not None}
    start = least_loaded([one for one in prefill if one.exchange in exchanges], prefer)
    return place_whole(decode, Reason.NO_PAIR, prefer) if start is None else Placement(start.name, Reason.SPLIT)


def evened(split: Placement, candidates: Sequence[Candidate]) -> Placement:
    """A split as long as nobody knows what work takes: whole on the side that does less, where the other does more.

    Short prompts and long answers, all split, would fill decode engines while the others idle, and the other way round.
    """
    exchange = next(one.exchange for one in candidates if one.name == split.engine)
    able = [one for one in candidates if one.exchange == exchange]
    prefill = [one for one in able if one.role == "prefill"]
    decode = [one for one in able if one.role == "decode"]
    excess = sum(one.load for one in decode) - sum(one.load for one in prefill)
    if abs(excess) <= UNEVEN_LOAD:
        return split
    whole = place_whole(prefill, Reason.DECODE_BUSY) if excess > 0 else place_whole(decode, Reason.PREFILL_BUSY)
    return whole or split


def place_rest(
    candidates: Sequence[Candidate], exchange: str | None, *, prefer: str | None = None, avoid: str | None = None
) -> Candidate | None:
    """Where a request that has some tokens goes on: a decode engine, one that can pull its KV if there is one.

    `avoid` is the engine that it is leaving; it stays there only if there is no other.
    """
    others = [one for one in candidates if one.name != avoid] or list(candidates)
    decode = [one for one in others if one.role == "decode"] or others
    pulling = [one for one in decode if exchange is not None and one.exchange == exchange]
    return least_loaded(pulling or decode, () if prefer is None else (prefer,))


def place_whole(candidates: Sequence[Candidate], reason: Reason, prefer: Container[str] = ()) -> Placement | None:
    """All of a request on the engine with the least to do, or on one that knows its beginning."""
    start = least_loaded(candidates, prefer)
    return None if start is None else Placement(start.name, reason)
