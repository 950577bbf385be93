"""Local or split: what is predicted for a request at each engine, and the choice that keeps most requests in time.

Pure: numbers in, a choice out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import erfc, hypot, sqrt

from msgspec import Struct

from fourhop.router.policy import Reason

TTFT_FACTOR = 4.0
ITL_FACTOR = 2.0
"""Targets of a request that has none: so many times what an idle engine takes."""

LEAST_TTFT_S = 0.05
LEAST_ITL_S = 0.005

SPREAD = 0.15
"""What is predicted is off by so much of it, give or take."""

MOST_BUSY = 0.95
"""An engine that is busier with prompts than this part of its time is as bad as one that is so busy."""

SQRT2 = sqrt(2.0)

LEAST_MISSED = 0.05
"""Differences in expected misses below this are none."""

EXCESS_WEIGHT = 10.0
"""What a pause counts that is beyond what is allowed, compared with waiting for one's own first token."""


class Prospect(Struct):
    """An engine as a request would find it.

    `wait_s` until its prompt is begun, `prefill_s` from then to its first token, `step_s` between two tokens with one
    stream more and `now_step_s` without; `pause_rate` prompts of `pause_s` come in a second while there are streams;
    `num_paused` streams would wait while its prompt is computed here, `num_kept` of which are in time so far;
    `num_streams` are here or will be. Of those `num_beside` stay beside its own, counted by the part of its time.
    `handover_s` is for KV that is brought here, `credit` how many pauses are allowed.
    """

    name: str
    exchange: str | None = None
    wait_s: float = 0.0
    prefill_s: float = 0.0
    handover_s: float = 0.0
    step_s: float = 0.0
    now_step_s: float = 0.0
    pause_rate: float = 0.0
    pause_s: float = 0.0
    num_paused: int = 0
    num_kept: int = 0
    num_streams: int = 0
    num_new_tokens: int = 0
    num_beside: float = 0.0
    credit: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.prefill_s

    @property
    def pausing_s(self) -> float:
        """For how long its prompt would keep streams waiting: the step that ends it gives each of them a token too."""
        return max(0.0, self.prefill_s - self.now_step_s)


class Aim(Struct, frozen=True):
    """What a request is to keep: seconds to its first token, and seconds a token after that over `num_output`."""

    ttft_s: float
    itl_s: float
    num_output: float


class Option(Struct):
    """A way to serve a request. Of two the one is better that makes fewer requests miss their targets, by expectation,
    and among equals that which takes less time, what others lose included.
    """

    engine: str
    decode: str
    is_split: bool
    ttft_s: float
    itl_s: float
    num_missed: float
    seconds: float
    num_paused: int = 0
    is_late: bool = False
    num_beside: float = 0.0

    @property
    def rank(self) -> tuple[int, float]:
        return (round(self.num_missed / LEAST_MISSED), self.seconds)


def aim_of(ttft_s: float, itl_s: float, *, idle_prefill_s: float, idle_step_s: float, num_output: float) -> Aim:
    """The targets, and where one is 0 a multiple of what the request would take alone."""
    return Aim(
        ttft_s or max(LEAST_TTFT_S, TTFT_FACTOR * idle_prefill_s),
        itl_s or max(LEAST_ITL_S, ITL_FACTOR * idle_step_s),
        max(1.0, num_output),
    )


def split_over(prefill: Prospect, decode: Prospect, aim: Aim) -> Option:
    """Prefill here, decode there. Streams of the prefill engine wait for the prompt."""
    ttft_s = prefill.ttft_s
    late_s = max(decode.handover_s, decode.wait_s - ttft_s)
    kept = _in_time(ttft_s, decode, 0.0, late_s, aim)
    lost = _lost(prefill, prefill.num_kept, prefill.now_step_s, prefill.pausing_s, aim)
    lost += _lost(decode, decode.num_beside, decode.step_s, 0.0, aim)
    decode_s = _decode_s(decode, 0.0, aim)
    seconds = ttft_s + late_s + decode_s + _waited_s(prefill) + _slowed_s(decode, aim)
    return _option(prefill, decode, 1.0 - kept + lost, seconds, decode_s, aim)


def whole_on(engine: Prospect, aim: Aim, before_s: float = 0.0) -> Option:
    """All of it here. Streams that run here wait for the prompt, and have one more beside them.

    Prompts that come in the next `before_s` will be computed between its tokens.
    """
    ttft_s, decode_s = engine.ttft_s, _decode_s(engine, before_s, aim)
    kept = _in_time(ttft_s, engine, before_s, 0.0, aim)
    lost = _lost(engine, engine.num_kept, engine.now_step_s, engine.pausing_s, aim)
    lost += _lost(engine, engine.num_beside, engine.step_s, 0.0, aim)
    seconds = ttft_s + decode_s + _waited_s(engine) + _slowed_s(engine, aim)
    return _option(engine, engine, 1.0 - kept + lost, seconds, decode_s, aim)


def _option(start: Prospect, decode: Prospect, num_missed: float, seconds: float, decode_s: float, aim: Aim) -> Option:
    ttft_s, num_paused = start.ttft_s, start.num_paused if start.prefill_s > aim.itl_s else 0
    if num_paused > start.credit:
        seconds += (num_paused - start.credit) * start.prefill_s * EXCESS_WEIGHT
    return Option(
        start.name,
        decode.name,
        start is not decode,
        ttft_s,
        decode_s / aim.num_output,
        num_missed,
        seconds,
        num_paused,
        ttft_s > aim.ttft_s,
        decode.num_beside,
    )


def choose(prefill: Sequence[Prospect], decode: Sequence[Prospect], aim: Aim) -> tuple[Option, Reason]:
    """The best way, and the word for it. There is a prefill engine that can hand over to a decode engine."""
    exchanges = {one.exchange for one in decode if one.exchange is not None}
    start = min((one for one in prefill if one.exchange in exchanges), key=lambda one: (one.ttft_s, one.name))
    takers = [one for one in decode if one.exchange == start.exchange]
    company = min(takers, key=lambda one: (one.step_s, one.pause_rate * one.pause_s, one.num_streams, one.name))
    split = split_over(start, company, aim)
    local = min((whole_on(one, aim) for one in decode), key=_by_rank)
    here = min((whole_on(one, aim, one.ttft_s) for one in prefill), key=_by_rank)
    best = local if local.rank < split.rank else split
    if here.rank < best.rank:
        return here, Reason.DECODE_BUSY if company.num_streams else Reason.NO_HARM
    if best is split:
        return split, Reason.SPLIT
    engine = next(one for one in decode if one.name == local.engine)
    return local, _why(engine, start, aim)


def _by_rank(one: Option) -> tuple[int, float, str]:
    return (*one.rank, one.engine)


def _why(engine: Prospect, start: Prospect, aim: Aim) -> Reason:
    """Why a decode engine takes the whole of a request."""
    if engine.num_new_tokens < start.num_new_tokens:
        return Reason.PREFIX_HIT
    if engine.prefill_s <= aim.itl_s:
        return Reason.SHORT_PROMPT
    if start.wait_s > engine.wait_s:
        return Reason.PREFILL_BUSY
    return Reason.NO_HARM if engine.num_paused else Reason.DECODE_IDLE


def _in_time(ttft_s: float, engine: Prospect, before_s: float, late_s: float, aim: Aim) -> float:
    """How likely the request keeps both its targets when this engine decodes it."""
    return chance(aim.ttft_s, ttft_s, SPREAD * ttft_s) * _keeps(engine, engine.step_s, before_s, late_s, aim)


def _lost(engine: Prospect, num_streams: float, step_s: float, pause_s: float, aim: Aim) -> float:
    """How many of so many streams of this engine are to lose their pace by such steps and one such pause."""
    if not num_streams:
        return 0.0
    return num_streams * (_keeps(engine, engine.now_step_s, 0.0, 0.0, aim) - _keeps(engine, step_s, 0.0, pause_s, aim))


def _keeps(engine: Prospect, step_s: float, before_s: float, lost_s: float, aim: Aim) -> float:
    """How likely a stream keeps its pace: the prompts that come in its time leave it within its target.

    They come at random (Poisson), each of the usual length, also while it waits for others: their number is that of the
    customers of a busy period, which has a mean of `x / (1 - b)` and a variance of `x / (1 - b)**3` (Borel, Tanner),
    where `x` come in the time that it takes without any and `b` is the part of its time that an engine is busy by them.
    """
    work_s, left = step_s * aim.num_output + lost_s, _left(engine)
    num_pauses = engine.pause_rate * (before_s + work_s) / left
    mean_s = work_s + num_pauses * engine.pause_s
    return chance(aim.itl_s * aim.num_output, mean_s, hypot(SPREAD * mean_s, sqrt(num_pauses) * engine.pause_s / left))


def chance(limit: float, mean: float, spread: float) -> float:
    """How likely what is expected to be `mean`, give or take `spread`, is not more than the limit."""
    return 0.5 * erfc((mean - limit) / (spread * SQRT2)) if spread else float(mean <= limit)


def _decode_s(engine: Prospect, before_s: float, aim: Aim) -> float:
    """From the first token to the last, pauses included."""
    left = _left(engine)
    return (engine.step_s * aim.num_output + (1.0 - left) * before_s) / left


def _left(engine: Prospect) -> float:
    """The part of its time that an engine has for streams."""
    return 1.0 - min(MOST_BUSY, engine.pause_rate * engine.pause_s)


def _waited_s(engine: Prospect) -> float:
    """Seconds that the streams of the engine wait for this prompt, all together."""
    return engine.num_paused * engine.prefill_s


def _slowed_s(engine: Prospect, aim: Aim) -> float:
    """Seconds by which the streams of the engine are slower for one more, all together."""
    return engine.num_beside * (engine.step_s - engine.now_step_s) * aim.num_output
