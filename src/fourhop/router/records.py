"""What one request of a client came to: its line in the log, and its story."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from fourhop.router.keys import Account
from fourhop.router.run import Run
from fourhop.service.tracing import Hop
from fourhop.wire.errors import FourhopError
from fourhop.wire.generate import GenerateRequest
from fourhop.wire.moments import Moment, Timeline
from fourhop.wire.why import Step, Story

WORDS: dict[str, str] = {
    Moment.RECEIVED: "received",
    Moment.ADMITTED: "admitted",
    Moment.PREFILL_STARTED: "prefill begins",
    Moment.PREFILL_DONE: "prefill is done, the first token is there",
    Moment.KV_REQUESTED: "decode asks for the KV",
    Moment.KV_READY: "decode has the KV",
    Moment.DECODE_STARTED: "decode has made its first token",
    Moment.LAST_TOKEN: "the last token is there",
}


class Life(NamedTuple):
    """One choice's: its moments, and what was decided and when."""

    at_s: dict[str, float]
    told: list[tuple[float, str]]


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a request: not its tokens, and its story only as far as it costs nothing to keep.

    `ended_s` is seconds after it was received.
    """

    request_id: str
    outcome: str
    finish: str | None
    status: int | None
    error: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_retries: int
    lives: list[Life]
    ended_s: float

    def story(self) -> Story:
        ending = self.outcome if self.error is None else f"{self.outcome}: {self.error}"
        return Story(
            request_id=self.request_id,
            outcome=self.outcome,
            status=self.status,
            error=self.error,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_choices=len(self.lives),
            num_retries=self.num_retries,
            steps=[*steps_of(self.lives), Step(self.ended_s, f"{ending} ({self.finish})" if self.finish else ending)],
        )


@dataclass(eq=False)
class Record:
    """One request of a client, from its arrival to its end. `outcome` stays "cancelled" if nothing else ends it."""

    request: GenerateRequest
    timeline: Timeline
    runs: list[Run] = field(default_factory=list)
    outcome: str = "cancelled"
    error: FourhopError | None = None
    hop: Hop | None = None
    owner: Account | None = None

    @property
    def num_tokens(self) -> int:
        """What is billed: the prompt once an engine had it, and every token that was made."""
        if not any(run.prefill for run in self.runs):
            return 0
        return len(self.request.token_ids) + sum(len(run.delivered) for run in self.runs)

    def fail(self, error: FourhopError) -> None:
        self.error = error
        self.outcome = "refused" if error.status < 500 and not any(run.delivered for run in self.runs) else "failed"

    def line(self, ended_s: float) -> dict[str, Any]:
        """What the log tells of it, `ended_s` seconds after it was received."""
        runs = self.runs
        moments = runs[0].timeline.since_received() if runs else {}
        return {
            "request_id": self.request.request_id or None,
            "outcome": self.outcome,
            "status": None if self.error is None else self.error.status,
            "finish": self._joined(run.finish for run in runs),
            "reason": self._joined(run.reason for run in runs),
            **self._predicted(),
            "prefill": self._joined(run.prefill for run in runs),
            "decode": self._joined(run.decode for run in runs),
            "prompt_tokens": len(self.request.token_ids),
            "completion_tokens": sum(run.num_output for run in runs),
            "retries": sum(run.num_retries for run in runs),
            **{f"{name}_ms": f"{at_s * 1000:.1f}" for name, at_s in moments.items() if name != Moment.RECEIVED},
            "finished_ms": f"{ended_s * 1000:.1f}",
            "error": None if self.error is None else self.error.message,
            "trace_id": None if self.hop is None else self.hop.trace_id,
        }

    def ended(self, ended_s: float) -> Ended:
        """What is kept of it, `ended_s` seconds after it was received."""
        return Ended(
            request_id=self.request.request_id,
            outcome=self.outcome,
            finish=self._joined(run.finish for run in self.runs),
            status=None if self.error is None else self.error.status,
            error=None if self.error is None else self.error.message,
            num_prompt_tokens=len(self.request.token_ids),
            num_output_tokens=sum(run.num_output for run in self.runs),
            num_retries=sum(run.num_retries for run in self.runs),
            lives=[Life(run.timeline.at_s, run.told) for run in self.runs],
            ended_s=ended_s,
        )

    def trace(self, hop: Hop) -> None:
        """Tell what the log tells in a span, and what each choice did in spans inside it."""
        line = self.line(0.0)
        names = ("outcome", "finish", "reason", "prefill", "decode", "retries", "predicted_ttft_ms", "predicted_itl_ms")
        attributes = {
            "gen_ai.request.id": line["request_id"],
            "gen_ai.usage.prompt_tokens": line["prompt_tokens"],
            "gen_ai.usage.completion_tokens": line["completion_tokens"],
            "http.response.status_code": line["status"],
            "error.message": line["error"],
            **{f"fourhop.{name}": line.get(name) for name in names},
        }
        lives = [run.timeline.at_s for run in self.runs] or [self.timeline.at_s]
        hop.end("route", lives, attributes, has_failed=self.outcome == "failed")

    def _predicted(self) -> dict[str, str]:
        """What the router's own choice was based on, for the first choice of the request."""
        forecast = self.runs[0].forecast if self.runs else None
        if forecast is None or forecast.ttft_s is None or forecast.itl_s is None:
            return {}
        return {
            "predicted_ttft_ms": f"{forecast.ttft_s * 1000:.1f}",
            "predicted_itl_ms": f"{forecast.itl_s * 1000:.2f}",
        }

    @staticmethod
    def _joined(values: Iterable[str | None]) -> str | None:
        """The different values, in order, as one word of the log."""
        return ",".join(dict.fromkeys(value for value in values if value is not None)) or None


def steps_of(lives: Sequence[Life]) -> list[Step]:
    """What happened to all choices of a request, in order of time."""
    steps: list[Step] = []
    for number, life in enumerate(lives):
        prefix = f"choice {number}: " if len(lives) > 1 else ""
        received_s = life.at_s[Moment.RECEIVED]
        shared = (Moment.RECEIVED, Moment.ADMITTED) if number else ()
        moments = [(at_s, WORDS[name]) for name, at_s in life.at_s.items() if name in WORDS and name not in shared]
        steps += [Step(at_s - received_s, prefix + what) for at_s, what in [*moments, *life.told]]
    return sorted(steps, key=lambda step: step.after_s)
