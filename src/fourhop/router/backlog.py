"""What one engine was given and has not done yet: prompts to compute, streams that run, streams that will arrive.

Keys are whatever stands for the work (a leg, a run). Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

GAP_SHARE = 0.1
"""What the newest gap between two prompts counts in the usual one."""

LEAST_GAP_S = 1e-6

USUAL_GAPS = 2.0
"""As so many gaps between prompts counts what is usual elsewhere."""


@dataclass
class Arrivals:
    """How often prompts come, and how long one takes."""

    usual_s: float = 0.0
    _last_s: float | None = None
    _num: float = 0.0
    _past_s: float = 0.0

    def note(self, seconds: float, now_s: float) -> None:
        """A prompt came, which is expected to take so long."""
        if self._last_s is None:
            self.usual_s = seconds
        else:
            self.usual_s += (seconds - self.usual_s) * GAP_SHARE
            self._num += 1.0 - self._num * GAP_SHARE
            self._past_s += now_s - self._last_s - self._past_s * GAP_SHARE
        self._last_s = now_s

    def rate(self, now_s: float, usual: float = 0.0) -> float:
        """Prompts a second, by the gaps between the last ones; of the one that is open now what is longer than those.

        A rate that is usual elsewhere counts as much as `USUAL_GAPS` gaps.
        """
        num, past_s = self._num, self._past_s
        if num and self._last_s is not None:
            past_s += max(0.0, now_s - self._last_s - past_s / num)
        if usual:
            num, past_s = num + USUAL_GAPS, past_s + USUAL_GAPS / usual
        return num / max(LEAST_GAP_S, past_s) if num else 0.0


@dataclass(eq=False)
class Backlog:
    """Prompts are computed in the order in which they came. A key is in one place at a time.

    `streams` are those that run, with when they began, `coming` those that will, of prompts here or with KV from
    elsewhere, with when that is expected. `pauses` are prompts that came while there were streams, in the time in which
    there were. `credit` is how many pauses streams may still be given. Those that are `late` miss their targets anyhow.
    """

    prompts: dict[Hashable, float] = field(default_factory=dict)
    coming: dict[Hashable, float] = field(default_factory=dict)
    streams: dict[Hashable, float] = field(default_factory=dict)
    late: set[Hashable] = field(default_factory=set)
    pauses: Arrivals = field(default_factory=Arrivals)
    usual_beside: float = 0.0
    credit: float = 0.0
    _prompts_s: float = 0.0
    _head_since_s: float = 0.0
    _streamed_s: float = 0.0
    _streams_since_s: float = 0.0

    def announce_prompt(self, key: Hashable, seconds: float, now_s: float) -> None:
        """A prompt will be sent, which is expected to take so long when its turn comes."""
        if not self.prompts:
            self._head_since_s, self._prompts_s = now_s, 0.0
        self.prompts[key] = seconds
        self._prompts_s += seconds

    def withdraw_prompt(self, key: Hashable) -> None:
        """An announced prompt is sent now, or will not be. The one that is being computed goes on."""
        self._prompts_s -= self.prompts.pop(key, 0.0)

    def expect_prompt(self, key: Hashable, seconds: float, now_s: float, *, stays: bool) -> None:
        """A prompt was sent. If it stays, a stream follows."""
        self.announce_prompt(key, seconds, now_s)
        if self.streams:
            self.pauses.note(seconds, self.streamed_s(now_s))
        if stays:
            self.coming[key] = now_s + self.wait_s(now_s)

    def expect_stream(self, key: Hashable, ready_at_s: float) -> None:
        """A place is taken for a stream whose KV will be here at about that time."""
        self.coming[key] = ready_at_s

    def begin_stream(self, key: Hashable, now_s: float) -> None:
        """A stream has its first token of this engine."""
        self.drop(key, now_s)
        if not self.streams:
            self._streams_since_s = now_s
        self.streams[key] = now_s

    def mark_late(self, key: Hashable) -> None:
        """Its first token will not be in time, or was not: nothing more is lost by a pause."""
        self.late.add(key)

    def drop(self, key: Hashable, now_s: float) -> None:
        """It is done here, or will not be done."""
        self.late.discard(key)
        if self.streams.pop(key, None) is not None and not self.streams:
            self._streamed_s += now_s - self._streams_since_s
        self.coming.pop(key, None)
        seconds = self.prompts.pop(key, None)
        if seconds is not None:
            self._prompts_s -= seconds
            self._head_since_s = now_s

    def streamed_s(self, now_s: float) -> float:
        """Seconds in which there were streams, all in all."""
        return self._streamed_s + (now_s - self._streams_since_s if self.streams else 0.0)

    def pause_rate(self, now_s: float, usual_rate: float) -> float:
        """Prompts a second that come while there are streams; a rate that is usual elsewhere, until it is seen here."""
        return self.pauses.rate(self.streamed_s(now_s), usual_rate)

    def wait_s(self, now_s: float) -> float:
        """How long the prompts that are here will take."""
        return max(0.0, self._prompts_s - self.computed_s(now_s)) if self.prompts else 0.0

    def computed_s(self, now_s: float) -> float:
        """How long the first of the prompts that are here is computed already."""
        return min(next(iter(self.prompts.values())), now_s - self._head_since_s) if self.prompts else 0.0

    def num_streams(self) -> int:
        """Streams that run, and such as there will be."""
        return len(self.streams) + len(self.coming)

    def num_beside(self, begin_s: float, life_s: float) -> float:
        """Streams of now beside one that begins then, by the part of its time that they stay: all live that long."""
        total = 0.0
        if life_s <= 0.0:
            return total
        for times in (self.streams, self.coming):
            for at_s in times.values():
                total += max(0.0, 1.0 - abs(begin_s - at_s) / life_s)
        return total

    def company(self, num_beside: float) -> float:
        """Streams beside one, over its time: so many of now, and such as usually begin after it."""
        return num_beside + self.usual_beside

    def note_company(self, num_beside: float) -> None:
        """A stream was placed here, which will have so many of now beside it: as many will begin after it."""
        self.usual_beside += (num_beside - self.usual_beside) * GAP_SHARE

    def num_paused_by(self, until_s: float) -> tuple[int, int]:
        """Streams that a prompt which is computed from now until then would keep waiting; and such as are in time."""
        soon = [key for key, ready_at_s in self.coming.items() if ready_at_s < until_s]
        num_paused = len(self.streams) + len(soon)
        if not self.late:
            return num_paused, num_paused
        return num_paused, num_paused - len(self.late & self.streams.keys()) - sum(key in self.late for key in soon)
