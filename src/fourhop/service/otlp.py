"""Sending spans to a collector: OpenTelemetry's own batches, encoding and HTTP, in a thread of theirs.

Its tracer is not used: it draws the id of a span when the span is made, and ours are told to the next hop long before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Thread

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from prometheus_client import CollectorRegistry, Counter

from fourhop import __version__
from fourhop.service.logs import event
from fourhop.service.tracing import Span
from fourhop.wire.trace import TraceContext

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
"""Patience with the collector for one batch, its repeats included; a stop waits for two at most."""

CLOSE_S = 2 * TIMEOUT_S + 1.0

MAX_QUEUED = 2048
"""Spans that wait for the collector."""

SCOPE = InstrumentationScope("fourhop", __version__)
FAILED = Status(StatusCode.ERROR)
FINE = Status(StatusCode.UNSET)


@contextmanager
def open_sender(url: str, registry: CollectorRegistry) -> Iterator[Callable[[Span], None]]:
    """What takes spans to send, in one thread and without waiting. What is not sent is counted, and told once."""
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # what it says of failures, _Counted says
    exporter = _Counted(OTLPSpanExporter(url, timeout=TIMEOUT_S), url, registry)
    processor = BatchSpanProcessor(exporter, max_queue_size=MAX_QUEUED, schedule_delay_millis=1000)

    def send(span: Span) -> None:
        if exporter.makes_room():
            processor.on_end(to_otel(span))

    try:
        yield send
    finally:
        exporter.is_closing = True
        closing = Thread(target=processor.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)  # a resolver that hangs knows no patience of ours


class _Counted(SpanExporter):
    """An exporter that counts what it sent and what it lost; one that closes gives up with the first loss.

    It also counts what waits for it: OpenTelemetry's queue drops what it has no room for, and does not tell.
    """

    def __init__(self, exporter: SpanExporter, url: str, registry: CollectorRegistry) -> None:
        self.is_closing = False
        self._exporter = exporter
        self._url = url
        self._has_lost = False
        self._is_lost = False
        self._num_queued = 0  # written by the thread that makes spans
        self._num_taken = 0  # written by the thread that exports them
        self._spans = Counter(
            "fourhop:spans", "Spans of traces, by what became of them", ["outcome"], registry=registry
        )

    def makes_room(self) -> bool:
        """Whether the queue has room for a span, which is then expected to be put there; else it counts as dropped."""
        if self._num_queued - self._num_taken >= MAX_QUEUED:
            self._spans.labels("dropped").inc()
            self._tell()
            return False
        self._num_queued += 1
        return True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._num_taken += len(spans)
        result = SpanExportResult.FAILURE
        if not (self.is_closing and self._is_lost):
            result = self._exporter.export(spans)
        self._is_lost = result is not SpanExportResult.SUCCESS
        self._spans.labels("lost" if self._is_lost else "sent").inc(len(spans))
        if self._is_lost:
            self._tell()
        return result

    def _tell(self) -> None:
        if not self._has_lost:
            self._has_lost = True
            log.warning(event("traces_lost", collector=self._url, counted_in="fourhop:spans_total"))

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def to_otel(span: Span) -> ReadableSpan:
    """A span as OpenTelemetry has it."""
    return ReadableSpan(
        span.name,
        context=_context(span.context, is_remote=False),
        parent=None if span.parent is None else _context(span.parent, is_remote=span.is_hop),
        resource=_resource(span.tier),
        attributes=span.attributes,
        kind=SpanKind.SERVER if span.is_hop else SpanKind.INTERNAL,
        status=FAILED if span.has_failed else FINE,
        start_time=span.begin_ns,
        end_time=span.end_ns,
        instrumentation_scope=SCOPE,
    )


def _context(context: TraceContext, *, is_remote: bool) -> SpanContext:
    return SpanContext(context.trace_id, context.span_id, is_remote, TraceFlags(TraceFlags.SAMPLED))


@cache
def _resource(tier: str) -> Resource:
    return Resource.create({"service.name": f"fourhop-{tier}", "service.version": __version__})
