"""Local or split: what is predicted for a request at each engine, and the choice that keeps most requests in time.

Pure: numbers in, a choice out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from msgspec import Struct

from fourhop.router.policy import Reason

TTFT_FACTOR = 4.0
ITL_FACTOR = 2.0
"""Targets of a request that has none: so many times what an idle engine takes."""

LEAST_TTFT_S = 0.05
LEAST_ITL_S = 0.005

SURE_LEFT = 0.2
"""A first token is sure to be in time if so much of that time is predicted to be left; with less it may be late."""

LEAST_MISSED = 0.05
"""Differences in expected misses below this are none."""

EXCESS_WEIGHT = 10.0
"""What a pause counts that is beyond what is allowed, compared with waiting for one's own first token."""

SHORT_STEPS = 5
"""A prompt is short that takes no longer than so many steps: hardly anybody notices the pause, and streams are better
spread evenly over all engines than kept apart from prompts.
"""

EVEN_MISSED = 5
"""Expected misses, in steps of `LEAST_MISSED`, that are not worth an uneven spread of short prompts."""

FREE_QUEUE = 0.25
"""The part of the time to its first token that a prompt may wait without anybody coming too late for it."""

QUEUE_PRICE = 1.5
"""Misses of those who come later, where a prompt joins a queue as long as the time to its first token may be; in a
shorter one less. Else a queue would grow until all who wait in it are late, before anybody is sent round it.
"""

MANY_PAUSES = 20
"""A stream that could take so many pauses is not lost by any."""


class Prospect(Struct):
    """An engine as a request would find it.

    `wait_s` until its prompt is begun, `prefill_s` from then to its first token, `step_s` between two tokens with one
    stream more and `now_step_s` without; `pause_rate` prompts of `pause_s` come in a second; `num_paused` streams would
    wait while its prompt is computed here, `num_kept` of which are in time so far; `num_streams` are here or will be.
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
    credit: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.prefill_s


class Aim(Struct, frozen=True):
    """What a request is to keep: seconds to its first token, and seconds a token after that over `num_output`."""

    ttft_s: float
    itl_s: float
    num_output: float


class Option(Struct):
    """A way to serve a request. Of two the one is better that makes fewer requests miss their targets, by expectation,
    and among equals that which takes less time, what others lose included. `num_behind` are misses of those who come
    later.
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
    num_behind: float = 0.0

    @property
    def rank(self) -> tuple[int, float]:
        return (round((self.num_missed + self.num_behind) / LEAST_MISSED), self.seconds)


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
    lost = _lost(prefill, prefill.num_kept, prefill.now_step_s, prefill.prefill_s, aim)
    lost += _lost(decode, decode.num_streams, decode.step_s, 0.0, aim)
    decode_s = _decode_s(decode, 0.0, aim)
    seconds = ttft_s + late_s + decode_s + _waited_s(prefill) + _slowed_s(decode, aim)
    return _option(prefill, decode, 1.0 - kept + lost, seconds, decode_s, aim)


def whole_on(engine: Prospect, aim: Aim, before_s: float = 0.0) -> Option:
    """All of it here. Streams that run here wait for the prompt, and have one more beside them.

    Prompts that come in the next `before_s` will be computed between its tokens.
    """
    ttft_s, decode_s = engine.ttft_s, _decode_s(engine, before_s, aim)
    kept = _in_time(ttft_s, engine, before_s, 0.0, aim)
    lost = _lost(engine, engine.num_kept, engine.step_s, engine.prefill_s, aim)
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
        _num_behind(start, aim),
    )


def choose(prefill: Sequence[Prospect], decode: Sequence[Prospect], aim: Aim) -> tuple[Option, Reason]:
    """The best way, and the word for it. There is a prefill engine that can hand over to a decode engine."""
    exchanges = {one.exchange for one in decode if one.exchange is not None}
    start = min((one for one in prefill if one.exchange in exchanges), key=lambda one: (one.ttft_s, one.name))
    takers = [one for one in decode if one.exchange == start.exchange]
    company = min(takers, key=lambda one: (one.step_s, one.pause_rate * one.pause_s, one.num_streams, one.name))
    split = split_over(start, company, aim)
    locally = [(whole_on(one, aim), one.num_streams) for one in decode]
    at_prefill = [(whole_on(one, aim, one.ttft_s), one.num_streams) for one in prefill]
    if start.prefill_s <= SHORT_STEPS * company.step_s:
        even, _ = min([*locally, *at_prefill], key=_by_streams)
        if even.rank[0] < split.rank[0] + EVEN_MISSED:
            return even, Reason.SHORT_PROMPT
    local, here = min(locally, key=_by_rank)[0], min(at_prefill, key=_by_rank)[0]
    best = local if local.rank < split.rank else split
    if here.rank < best.rank:
        return here, Reason.DECODE_BUSY if company.num_streams else Reason.NO_HARM
    if best is split:
        return split, Reason.SPLIT
    engine = next(one for one in decode if one.name == local.engine)
    return local, _why(engine, start, aim)


def _num_behind(start: Prospect, aim: Aim) -> float:
    """Misses of those who come after a request that joins the queue of this engine."""
    length = min(1.0, start.wait_s / aim.ttft_s)
    return QUEUE_PRICE * max(0.0, length - FREE_QUEUE) / (1.0 - FREE_QUEUE)


def _by_rank(one: tuple[Option, int]) -> tuple[int, float, str]:
    return (*one[0].rank, one[0].engine)


def _by_streams(one: tuple[Option, int]) -> tuple[int, int, float, str]:
    num_missed, seconds = one[0].rank
    return num_missed // EVEN_MISSED, one[1], seconds, one[0].engine


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
    left = 1.0 - ttft_s / aim.ttft_s
    if left <= 0.0:
        return 0.0
    return min(1.0, left / SURE_LEFT) * _keeps(engine, engine.step_s, before_s, late_s, aim)


def _lost(engine: Prospect, num_streams: int, step_s: float, pause_s: float, aim: Aim) -> float:
    """How many of so many streams of this engine are to lose their pace by such steps and one such pause."""
    if not num_streams:
        return 0.0
    return num_streams * (_keeps(engine, engine.now_step_s, 0.0, 0.0, aim) - _keeps(engine, step_s, 0.0, pause_s, aim))


def _keeps(engine: Prospect, step_s: float, before_s: float, lost_s: float, aim: Aim) -> float:
    """How likely a stream keeps its pace: the prompts that come in its time leave it within its target.

    They are taken to come at random (Poisson), each of the engine's usual length.
    """
    slack_s = (aim.itl_s - step_s) * aim.num_output - lost_s
    if slack_s < 0.0:
        return 0.0
    if slack_s >= MANY_PAUSES * engine.pause_s:
        return 1.0
    # Prompts differ in length: what the slack nearly holds, it holds sometimes.
    most = max(0.0, slack_s / engine.pause_s - 0.5)
    low, part = int(most), most % 1.0
    mean = engine.pause_rate * (before_s + aim.num_output * step_s)
    sure = poisson_cdf(low, mean)
    return sure + part * (poisson_cdf(low + 1, mean) - sure) if part else sure


def poisson_cdf(most: int, mean: float) -> float:
    """How likely there are at most so many events where `mean` are expected."""
    term = total = exp(-mean)
    for number in range(1, most + 1):
        term *= mean / number
        total += term
    return min(1.0, total)


def _decode_s(engine: Prospect, before_s: float, aim: Aim) -> float:
    """From the first token to the last, pauses included."""
    decode_s = engine.step_s * aim.num_output
    return decode_s + engine.pause_rate * (before_s + decode_s) * engine.pause_s


def _waited_s(engine: Prospect) -> float:
    """Seconds that the streams of the engine wait for this prompt, all together."""
    return engine.num_paused * engine.prefill_s


def _slowed_s(engine: Prospect, aim: Aim) -> float:
    """Seconds by which the streams of the engine are slower for one more, all together."""
    return engine.num_streams * (engine.step_s - engine.now_step_s) * aim.num_output
