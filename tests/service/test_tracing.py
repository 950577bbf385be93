from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from fakes.collector import collecting
from fourhop.service.tracing import Span, Tracer, TracingConfig, open_traces
from fourhop.wire.errors import StartError
from fourhop.wire.moments import Moment
from fourhop.wire.trace import TraceContext, parse_traceparent

CLIENT = TraceContext(7, 8)
SECOND_NS = 1_000_000_000
NOW_NS = 1_700_000_000 * SECOND_NS


def tracer(told: list[Span], now_s: float = 110.0) -> Tracer:
    ids = itertools.count(100)
    return Tracer("router", told.append, lambda: now_s, lambda: NOW_NS, lambda bits: next(ids))


def test_a_request_is_one_span_with_its_intervals_inside() -> None:
    told: list[Span] = []
    hop = tracer(told).begin(CLIENT.header)
    assert parse_traceparent(hop.traceparent) == (7, 100, True)
    life = {"received": 100.0, "admitted": 104.0, "placed": 105.0}
    hop.end("route", [life], {"a": 1, "b": None}, has_failed=True)
    whole, *parts = told
    assert (whole.name, whole.context, whole.parent) == ("route", (7, 100, True), CLIENT)
    assert (whole.begin_ns, whole.end_ns) == (NOW_NS - 10 * SECOND_NS, NOW_NS)
    assert (whole.attributes, whole.is_hop, whole.has_failed) == ({"a": 1}, True, True)
    assert [(part.name, (part.end_ns - part.begin_ns) / SECOND_NS) for part in parts] == [
        ("queue", 4.0),
        ("placement", 1.0),
        ("finish", 5.0),
    ]
    assert {part.parent for part in parts} == {whole.context}
    assert len({span.context.span_id for span in told}) == len(told)


@pytest.mark.parametrize("given_header", [None, "nonsense"])
def test_without_a_parent_a_trace_begins(given_header: str | None) -> None:
    told: list[Span] = []
    hop = tracer(told).begin(given_header)
    hop.end("route", [{"received": 100.0}], {})
    assert told[0].parent is None and told[0].context.trace_id == 100
    assert parse_traceparent(hop.traceparent) == told[0].context


def test_a_trace_that_nobody_wants_is_passed_on_and_not_told() -> None:
    told: list[Span] = []
    unwanted = CLIENT._replace(is_sampled=False)
    hop = tracer(told).begin(unwanted.header)
    hop.end("route", [{"received": 100.0}], {})
    assert told == [] and hop.traceparent == unwanted.header


LIVES = st.lists(st.dictionaries(st.sampled_from([m.value for m in Moment][1:]), st.floats(0.0, 9.0)), max_size=3)


@given(LIVES)
def test_spans_nest_and_fill_the_time(lives: list[dict[str, float]]) -> None:
    told: list[Span] = []
    complete = [{"received": 0.0, **life, "finished": 10.0} for life in lives]
    tracer(told, 10.0).begin(None).end("route", complete, {})
    whole, *parts = told
    assert len(parts) == sum(len(life) - 1 for life in complete)
    assert all(whole.begin_ns <= part.begin_ns <= part.end_ns <= whole.end_ns for part in parts)
    if lives:
        assert min(part.begin_ns for part in parts) == whole.begin_ns
        assert max(part.end_ns for part in parts) == whole.end_ns == whole.begin_ns + 10 * SECOND_NS
    numbers = {part.attributes.get("fourhop.choice") for part in parts}
    assert numbers == (set(range(len(lives))) if len(lives) > 1 else {None} if lives else set())


def test_a_collector_gets_them() -> None:
    registry = CollectorRegistry()
    with collecting() as collector:
        with open_traces(TracingConfig(collector.url), registry) as tracer_of:
            for tier in ("frontend", "router"):
                tracer = tracer_of(tier)
                assert tracer is not None
                hop = tracer.begin(CLIENT.header)
                received = {"received": tracer.clock()}
                hop.end("chat", [received], {"fourhop.outcome": "stop", "n": 3, "x": 0.5}, has_failed=tier == "router")
        assert set(collector.paths) == {"/v1/traces"}
        by_service = {name: span for name, span in collector.spans if span.name == "chat"}
        assert set(by_service) == {"fourhop-frontend", "fourhop-router"}
        span = by_service["fourhop-frontend"]
        assert int.from_bytes(span.trace_id, "big") == 7 and int.from_bytes(span.parent_span_id, "big") == 8
        values = {one.key: one.value for one in span.attributes}
        assert (values["fourhop.outcome"].string_value, values["n"].int_value, values["x"].double_value) == (
            "stop",
            3,
            0.5,
        )
        assert (span.status.code, by_service["fourhop-router"].status.code) == (0, 2)
        assert abs(span.end_time_unix_nano - time.time_ns()) < 60 * SECOND_NS
        inside = [part for name, part in collector.spans if part.name == "finish"]
        assert {part.parent_span_id for part in inside} == {span.span_id for span in by_service.values()}
    assert registry.get_sample_value("fourhop:spans_total", {"outcome": "sent"}) == 4


def test_what_a_full_queue_leaves_out_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A collector that is slow: every span is either sent or told of."""
    registry, num_requests = CollectorRegistry(), 1500
    with collecting() as collector:
        collector.gate.clear()
        with open_traces(TracingConfig(collector.url), registry) as tracer_of:
            tracer = tracer_of("router")
            assert tracer is not None
            for _ in range(num_requests):
                tracer.begin(None).end("route", [{"received": tracer.clock()}], {})
            collector.gate.set()
    counts = {
        outcome: registry.get_sample_value("fourhop:spans_total", {"outcome": outcome}) or 0.0
        for outcome in ("sent", "lost", "dropped")
    }
    assert counts["dropped"] >= 2 * num_requests - 2048 - 512, "what fits the queue, and one batch on its way"
    assert sum(counts.values()) == 2 * num_requests
    assert counts["sent"] == len(collector.spans)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [f"traces_lost collector={collector.url}/v1/traces counted_in=fourhop:spans_total"]


def lost_at(url: str) -> tuple[float, float]:
    """Send 600 requests' spans, more than one batch, to a collector that fails: how many were lost, in how long."""
    registry, begun_s = CollectorRegistry(), time.monotonic()
    with open_traces(TracingConfig(url), registry) as tracer_of:
        tracer = tracer_of("router")
        assert tracer is not None
        for _ in range(600):
            tracer.begin(None).end("route", [{"received": tracer.clock()}], {})
    return registry.get_sample_value("fourhop:spans_total", {"outcome": "lost"}) or 0.0, time.monotonic() - begun_s


@pytest.mark.parametrize("is_there", [False, True])
def test_a_collector_that_fails_costs_spans_one_line_and_little_time(
    is_there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with collecting() as collector:
        collector.status = 400
        if is_there:
            num_lost, took_s = lost_at(collector.url)
    if not is_there:
        num_lost, took_s = lost_at(collector.url)
    assert num_lost == 1200 and took_s < 20.0  # a bound of the design: two times the patience, on a busy machine
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [f"traces_lost collector={collector.url}/v1/traces counted_in=fourhop:spans_total"]


def test_nothing_is_made_and_nothing_imported_without_a_collector() -> None:
    with open_traces(TracingConfig(), CollectorRegistry()) as tracer_of:
        assert tracer_of("router") is None
    program = (
        "import sys, fourhop.cli, fourhop.router.app, fourhop.frontend.app; print('opentelemetry.sdk' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


def test_a_missing_extra_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fourhop.service.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    opening = open_traces(TracingConfig("http://127.0.0.1:4318"), CollectorRegistry())
    with pytest.raises(StartError, match=r"pip install 'fourhop\[otel\]'"), opening:
        pass


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:4318", "http://h:4318/v1/traces"),
        ("http://h:4318/", "http://h:4318/v1/traces"),
        ("https://h/otlp/v1/traces", "https://h/otlp/v1/traces"),
        (None, None),
    ],
)
def test_the_standards_path_is_added_where_there_is_none(given: str | None, url: str | None) -> None:
    assert TracingConfig(given).url == url


@pytest.mark.parametrize("wrong", ["h:4318", "grpc://h:4317", "http://"])
def test_what_is_no_url_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="not the URL of a collector"):
        TracingConfig(wrong)
