"""What one engine was given and has not done yet: prompts to compute, streams that run, streams that will arrive.

Keys are whatever stands for the work (a leg, a run). Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

GAP_SHARE = 0.1
"""What the newest gap between two prompts counts in the usual one."""

LEAST_GAP_S = 1e-6


@dataclass
class Arrivals:
    """How often prompts come, and how long one takes."""

    usual_s: float = 0.0
    _last_s: float | None = None
    _gap_s: float | None = None

    def note(self, seconds: float, now_s: float) -> None:
        """A prompt came, which is expected to take so long."""
        if self._last_s is None:
            self.usual_s = seconds
        else:
            self.usual_s += (seconds - self.usual_s) * GAP_SHARE
            gap_s = now_s - self._last_s
            self._gap_s = gap_s if self._gap_s is None else self._gap_s + (gap_s - self._gap_s) * GAP_SHARE
        self._last_s = now_s

    def rate(self, now_s: float) -> float:
        """Prompts a second, by the gaps between the last ones and the one that is open now."""
        if self._gap_s is None or self._last_s is None:
            return 0.0
        return 1.0 / max(LEAST_GAP_S, self._gap_s, (now_s - self._last_s) * GAP_SHARE)


@dataclass(eq=False)
class Backlog:
    """Prompts are computed in the order in which they came. A key is in one place at a time.

    Prompts that are `staying` become streams of the same engine. `credit` is how many pauses its streams may still be
    given. Those that are `late` miss their targets anyhow.
    """

    prompts: dict[Hashable, float] = field(default_factory=dict)
    arriving: dict[Hashable, float] = field(default_factory=dict)
    streams: set[Hashable] = field(default_factory=set)
    staying: set[Hashable] = field(default_factory=set)
    late: set[Hashable] = field(default_factory=set)
    arrivals: Arrivals = field(default_factory=Arrivals)
    credit: float = 0.0
    _prompts_s: float = 0.0
    _head_since_s: float = 0.0

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
        self.arrivals.note(seconds, now_s)
        if stays:
            self.staying.add(key)

    def expect_stream(self, key: Hashable, ready_at_s: float) -> None:
        """A place is taken for a stream whose KV will be here at about that time."""
        self.arriving[key] = ready_at_s

    def begin_stream(self, key: Hashable, now_s: float) -> None:
        """A stream has its first token of this engine."""
        self.drop(key, now_s)
        self.streams.add(key)

    def mark_late(self, key: Hashable) -> None:
        """Its first token will not be in time, or was not: nothing more is lost by a pause."""
        self.late.add(key)

    def drop(self, key: Hashable, now_s: float) -> None:
        """It is done here, or will not be done."""
        self.late.discard(key)
        self.streams.discard(key)
        self.arriving.pop(key, None)
        seconds = self.prompts.pop(key, None)
        if seconds is not None:
            self._prompts_s -= seconds
            self._head_since_s = now_s
            self.staying.discard(key)

    def wait_s(self, now_s: float) -> float:
        """How long the prompts that are here will take."""
        if not self.prompts:
            return 0.0
        head_s = next(iter(self.prompts.values()))
        return max(0.0, self._prompts_s - min(head_s, now_s - self._head_since_s))

    def num_streams(self) -> int:
        """Streams that run, and such as there will be."""
        return len(self.streams) + len(self.staying) + len(self.arriving)

    def num_paused_by(self, until_s: float) -> tuple[int, int]:
        """Streams that a prompt which is computed from now until then would keep waiting; and such as are in time."""
        if not (self.streams or self.staying or self.arriving):
            return 0, 0
        soon = [key for key, ready_at_s in self.arriving.items() if ready_at_s < until_s]
        num_paused = len(self.streams) + len(self.staying) + len(soon)
        if not self.late:
            return num_paused, num_paused
        num_late = len(self.late & self.streams) + len(self.late & self.staying) + sum(key in self.late for key in soon)
        return num_paused, num_paused - num_late
