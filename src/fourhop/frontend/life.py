"""The life of one generation request at the frontend: its moments, and its one end, one log line and one count."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect

from fourhop.frontend.metrics import FrontendMetrics
from fourhop.service.logs import event
from fourhop.service.tracing import Hop
from fourhop.wire.errors import FourhopError
from fourhop.wire.generate import GenerateChunk, GenerateRequest
from fourhop.wire.moments import Moment, Timeline, server_timing

log = logging.getLogger("fourhop.request")

CLIENT_CLOSED_REQUEST = 499
"""The status in the log when no status reached the client: it was gone."""


class Life:
    """Marks moments as they happen; `watch` encloses the work and sees to the end."""

    def __init__(
        self,
        path: str,
        metrics: FrontendMetrics,
        clock: Callable[[], float],
        *,
        hop: Hop | None = None,
        traceparent: str | None = None,
    ) -> None:
        self.request_id = ""
        self.traceparent = traceparent if hop is None else hop.traceparent
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self._path = path
        self._hop = hop
        self._metrics = metrics
        self._clock = clock
        self._timeline = Timeline(clock())
        self._sent_s = 0.0
        self._heard_s: float | None = None
        self._is_over = False

    def rendered(self, requests: list[GenerateRequest]) -> None:
        self._mark(Moment.RENDERED)
        self.num_prompt_tokens = sum(len(request.token_ids) for request in requests)
        self._metrics.render_seconds.observe(self._since_received(Moment.RENDERED))

    def sent(self) -> None:
        """The request goes upstream: the moments that upstream tells count from here."""
        self._sent_s = self._clock()

    def heard(self, chunk: GenerateChunk) -> None:
        """A chunk came from upstream. Where it tells no last token, the last chunk with a choice stands for it."""
        if chunk.choices:
            self._heard_s = self._clock()
        if chunk.choices and Moment.FIRST_TOKEN.value not in self._timeline.at_s:
            self._mark(Moment.FIRST_TOKEN)
            self._metrics.first_token_seconds.observe(self._since_received(Moment.FIRST_TOKEN))
        if chunk.moments:
            self._timeline.merge(chunk.moments, self._sent_s)

    def headers(self) -> dict[str, str]:
        """`Server-Timing` with the moments so far."""
        return {"Server-Timing": server_timing(self._timeline.since_received())}

    def end(self, finish: str, status: int = 200) -> None:
        """The request is over. Only the first call counts."""
        if self._is_over:
            return
        self._is_over = True
        if self._heard_s is not None:
            self._timeline.mark(Moment.LAST_TOKEN, self._heard_s)
        self._mark(Moment.FINISHED)
        self._metrics.requests.labels(finish).inc()
        self._metrics.end_to_end_seconds.observe(self._since_received(Moment.FINISHED))
        moments = {name: at_s for name, at_s in self._timeline.since_received().items() if at_s}
        if self._hop is not None:
            self._trace(self._hop, finish, status)
        log.info(
            event(
                self._path,
                request_id=self.request_id,
                status=status,
                finish=finish,
                prompt_tokens=self.num_prompt_tokens,
                completion_tokens=self.num_completion_tokens,
                **moments,
                trace_id=None if self._hop is None else self._hop.trace_id,
            )
        )

    def _trace(self, hop: Hop, finish: str, status: int) -> None:
        attributes: dict[str, str | int | float | None] = {
            "gen_ai.request.id": self.request_id,
            "gen_ai.usage.prompt_tokens": self.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": self.num_completion_tokens,
            "fourhop.outcome": finish,
            "http.response.status_code": status,
        }
        hop.end(self._path, [self._timeline.at_s], attributes, has_failed=finish == "failed")

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Ends the life when the work inside is refused, fails or is cancelled, and lets that pass on."""
        try:
            yield
        except FourhopError as error:
            self.end("refused" if error.status < 500 or error.status == 503 else "failed", error.status)
            raise
        except (asyncio.CancelledError, GeneratorExit, ClientDisconnect):
            self.end("cancelled", CLIENT_CLOSED_REQUEST)
            raise
        except Exception:
            self.end("failed", 500)
            raise

    def _mark(self, moment: Moment) -> None:
        self._timeline.mark(moment, self._clock())

    def _since_received(self, moment: Moment) -> float:
        return self._timeline.at_s[moment.value] - self._timeline.at_s[Moment.RECEIVED.value]
