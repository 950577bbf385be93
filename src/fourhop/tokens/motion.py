"""Whether a stock vLLM gets on, by what its `/metrics` tell of the work of its engine. Pure.

Its `/health` says that its processes live. Its counters and gauges are those of the engine's last step (vLLM 0.32,
`v1/metrics/loggers.py`), each of which sends them, also one that is but a part of a long prompt: the prompt's blocks
then show in the use of the cache. They stand still while a step lasts, while every request waits for KV of another
engine, and while the engine hangs. `--disable-log-stats` leaves them out, and then nothing is known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LOOKS = 4
"""How often the metrics are read in the time that a verdict takes: they are long."""

_SAMPLES = re.compile(
    rb"^vllm:(?:generation_tokens_total|prompt_tokens_total|prefix_cache_queries_total|num_preemptions_total|"
    rb"num_requests_running|num_requests_waiting|kv_cache_usage_perc)[{ ].*$",
    re.MULTILINE,
)
_TOKENS = b"vllm:generation_tokens_total"


def motion_of(metrics: bytes) -> bytes | None:
    """The samples that each step may move, of all data-parallel ranks; None if they are not told."""
    samples = _SAMPLES.findall(metrics)
    return b"\n".join(samples) if any(sample.startswith(_TOKENS) for sample in samples) else None


@dataclass
class Motion:
    """How long an engine that owes tokens has stood still, and whether it was found to hang.

    One that hangs does so until it moves or makes a token, also when nobody waits for it any more.
    """

    patience_s: float
    hangs: bool = False
    _sample: bytes | None = None
    _since_s: float | None = None
    _looked_s: float = 0.0

    def forget(self) -> None:
        """Another server may come up."""
        self.hangs, self._sample, self._since_s = False, None, None

    def wants_a_look(self, *, owes: bool, now_s: float) -> bool:
        """Whether it is time to read the metrics. An engine that owes nothing may stand still."""
        if self.hangs:
            return True
        if not owes:
            self._since_s = None
            return False
        return self._since_s is None or now_s - self._looked_s >= self.patience_s / LOOKS

    def note(self, sample: bytes | None, now_s: float) -> None:
        """What the metrics say. Without a word of theirs an engine is not suspected, nor cleared."""
        self._looked_s = now_s
        if sample is None:
            self._since_s = None
        elif self._since_s is None or sample != self._sample:
            self.hangs = self.hangs and sample == self._sample
            self._sample, self._since_s = sample, now_s

    def is_still(self, now_s: float) -> bool:
        """Whether it is to be asked for a token."""
        return self.hangs or (self._since_s is not None and now_s - self._since_s >= self.patience_s)

    def settle(self, *, hangs: bool, now_s: float) -> None:
        """What came of asking."""
        self.hangs, self._since_s = hangs, now_s
