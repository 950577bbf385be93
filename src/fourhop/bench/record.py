"""What one request gave, and what follows from it. Pure: times are handed in, in seconds on the client's clock.

TTFT ends with the first event that carries output: a token id, a text, thinking or a piece of a call. A first event
that only names the role carries none.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Source = Literal["ids", "usage", "estimate"]
"""Where a number of tokens comes from, the best first. An estimate is the text, tokenized again."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One request, from when it was due to its end. `error` is None for a success, "cancelled" if we stopped it.

    `chunk_at_s` is when each event that carried output was complete; `chunk_tokens` how many tokens it carried, None if
    that is not known. `said` are the numbers of output tokens by their source. `moments` are the server's, in seconds
    since it had received the request.
    """

    name: str
    due_s: float
    ready_s: float
    sent_s: float
    end_s: float
    error: str | None = None
    turn: int = 0
    num_asked: int = 0
    num_input: int = 0
    num_output: int = 0
    source: Source = "ids"
    said: Mapping[Source, int] = field(default_factory=dict)
    chunk_at_s: array[float] = field(default_factory=lambda: array("d"))
    chunk_tokens: array[int] | None = None
    num_cached: int | None = None
    moments: Mapping[str, float] = field(default_factory=dict)
    text: str = ""

    @property
    def is_good(self) -> bool:
        return self.error is None

    @property
    def disagrees(self) -> bool:
        """The server's usage and the ids that came tell different numbers of output tokens."""
        return "ids" in self.said and "usage" in self.said and self.said["ids"] != self.said["usage"]

    @property
    def ttft_s(self) -> float:
        return self.chunk_at_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def lag_s(self) -> float:
        """How late the client itself was: between due and ready to be sent."""
        return self.ready_s - self.due_s

    @property
    def queue_s(self) -> float:
        """How long the client's own limit on open requests held this one back."""
        return self.sent_s - self.ready_s

    @property
    def tpot_s(self) -> float | None:
        """(last - first) / (tokens - 1); None with a single token."""
        if self.num_output < 2:
            return None
        return (self.chunk_at_s[-1] - self.chunk_at_s[0]) / (self.num_output - 1)

    def chunk_gaps_s(self) -> list[float]:
        """Times between successive events that carried output."""
        return [later - earlier for earlier, later in zip(self.chunk_at_s, self.chunk_at_s[1:], strict=False)]

    def itls_s(self) -> list[float] | None:
        """The time before each token after the first event's; None if it is not known which event carried how many.

        A chunk of k tokens that comes after a gap stands for k tokens that took a k-th of the gap each.
        """
        if self.chunk_tokens is None:
            return None
        gaps = zip(self.chunk_gaps_s(), self.chunk_tokens[1:], strict=True)
        return [gap / num for gap, num in gaps for _ in range(num)]

    def meets(self, limits: Mapping[str, float]) -> bool:
        """Whether a success is inside all limits, in seconds. A single token has no TPOT and meets any limit on it."""
        values = {"ttft": self.ttft_s, "tpot": self.tpot_s or 0.0, "e2el": self.e2el_s}
        return all(values[name] <= limit for name, limit in limits.items())
