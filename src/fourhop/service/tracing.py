"""Traces: a span for each request at each hop, with one inside it for each interval between its moments.

Spans are made when a request has ended, out of its recorded moments. The id of a hop's span is drawn when the request
comes, so that the next hop can name it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry

from fourhop.wire.errors import StartError
from fourhop.wire.moments import RECEIVED, Moment, intervals
from fourhop.wire.trace import TraceContext, parse_traceparent

TRACES_PATH = "/v1/traces"

Attributes = Mapping[str, str | int | float | None]
"""What is None is left out."""


@dataclass(frozen=True)
class TracingConfig:
    """Where traces go.

    Attributes:
        otlp_endpoint: URL of a collector that takes OpenTelemetry's spans (OTLP over HTTP), as `http://127.0.0.1:4318`.
            Default: no traces.
    """

    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        url = self.otlp_endpoint
        if url is not None and not _is_url(url):
            raise ValueError(f"not the URL of a collector: {url}")

    @property
    def url(self) -> str | None:
        """The collector's address, with the standard's path where none is given."""
        if self.otlp_endpoint is None or urlsplit(self.otlp_endpoint).path.strip("/"):
            return self.otlp_endpoint
        return self.otlp_endpoint.rstrip("/") + TRACES_PATH


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        return False


@dataclass(frozen=True)
class Span:
    """What is told of one interval; `tier` is which of ours tells it. Times are Unix times."""

    tier: str
    name: str
    context: TraceContext
    parent: TraceContext | None
    begin_ns: int
    end_ns: int
    attributes: dict[str, str | int | float]
    is_hop: bool = False
    has_failed: bool = False


@dataclass(frozen=True)
class Tracer:
    """Makes the spans of one tier. `clock` is the one that its moments are read from."""

    tier: str
    send: Callable[[Span], None]
    clock: Callable[[], float] = time.monotonic
    now_ns: Callable[[], int] = time.time_ns
    draw: Callable[[int], int] = secrets.randbits

    def begin(self, traceparent: str | None) -> Hop:
        """A request comes. Without a parent that is known it begins a trace."""
        parent = parse_traceparent(traceparent)
        if parent is not None and not parent.is_sampled:
            return Hop(self, parent, parent)
        trace_id = self._id(128) if parent is None else parent.trace_id
        return Hop(self, TraceContext(trace_id, self._id(64)), parent)

    def new_context(self, parent: TraceContext) -> TraceContext:
        return TraceContext(parent.trace_id, self._id(64))

    def _id(self, num_bits: int) -> int:
        return self.draw(num_bits) or 1


@dataclass(frozen=True)
class Hop:
    """One request at one tier. `context` is that of its span, or of a parent that nobody wants recorded."""

    tracer: Tracer
    context: TraceContext
    parent: TraceContext | None

    @property
    def traceparent(self) -> str:
        """What the next hop is told."""
        return self.context.header

    @property
    def trace_id(self) -> str:
        """As it is written in logs."""
        return f"{self.context.trace_id:032x}"

    def end(
        self, name: str, lives: Iterable[Mapping[str, float]], attributes: Attributes, *, has_failed: bool = False
    ) -> None:
        """Tell of the request that has just ended: of itself, and of each of its choices' lives, moments on the
        tracer's clock, all with the moment `received`.
        """
        if not self.context.is_sampled:
            return
        now_s, now_ns = self.tracer.clock(), self.tracer.now_ns()

        def unix_ns(at_s: float) -> int:
            return now_ns - round((now_s - min(at_s, now_s)) * 1e9)

        told = [{**life, Moment.FINISHED.value: life.get(Moment.FINISHED, now_s)} for life in lives]
        begin_ns = min((unix_ns(life[RECEIVED]) for life in told), default=now_ns)
        given = {key: value for key, value in attributes.items() if value is not None}
        self._send(name, self.context, self.parent, begin_ns, now_ns, given, is_hop=True, has_failed=has_failed)
        for number, life in enumerate(told):
            choice = {"fourhop.choice": number} if len(told) > 1 else {}
            for interval in intervals(life):
                begin_ns, end_ns = unix_ns(interval.begin_s), unix_ns(interval.end_s)
                context = self.tracer.new_context(self.context)
                self._send(interval.name, context, self.context, begin_ns, end_ns, dict(choice))

    def _send(
        self,
        name: str,
        context: TraceContext,
        parent: TraceContext | None,
        begin_ns: int,
        end_ns: int,
        attributes: dict[str, str | int | float],
        *,
        is_hop: bool = False,
        has_failed: bool = False,
    ) -> None:
        tier = self.tracer.tier
        self.tracer.send(Span(tier, name, context, parent, begin_ns, end_ns, attributes, is_hop, has_failed))


@contextmanager
def open_traces(config: TracingConfig, registry: CollectorRegistry) -> Iterator[Callable[[str], Tracer | None]]:
    """What makes the tracer of a tier, None without a collector. Spans are sent from a thread until the block ends.

    Raises StartError if what it needs is not installed.
    """
    if config.url is None:
        yield lambda tier: None
        return
    try:
        from fourhop.service.otlp import open_sender
    except ModuleNotFoundError as error:
        raise StartError(f"--otlp-endpoint needs {error.name}: pip install 'fourhop[otel]'") from None
    with open_sender(config.url, registry) as send:
        yield lambda tier: Tracer(tier, send)
