from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourhop.wire.moments import Interval, Moment, intervals
from fourhop.wire.trace import TraceContext, parse_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("03", True), ("02", False)])
def test_a_traceparent_is_read(flags: str, is_sampled: bool) -> None:
    context = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert context == (int(TRACE, 16), int(SPAN, 16), is_sampled)
    assert context.header == f"00-{TRACE}-{SPAN}-{'01' if is_sampled else '00'}"


def test_a_later_version_may_say_more() -> None:
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-comes") == (int(TRACE, 16), int(SPAN, 16), True)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\r\nX: y",
        f"00-{TRACE[1:]}-{SPAN}-01",
    ],
)
def test_what_is_not_valid_is_read_over(value: str | None) -> None:
    assert parse_traceparent(value) is None


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_a_context_survives_its_header(trace_id: int, span_id: int, is_sampled: bool) -> None:
    context = TraceContext(trace_id, span_id, is_sampled)
    assert parse_traceparent(context.header) == context


def test_intervals_are_named_after_what_was_done() -> None:
    at_s = {"received": 0.0, "admitted": 1.0, "placed": 2.0, "prefill_started": 3.0, "prefill_done": 7.0}
    at_s |= {"kv_requested": 4.0, "kv_ready": 8.0, "decode_started": 8.5, "last_token": 20.0, "finished": 21.0}
    assert intervals(at_s) == [
        Interval("queue", 0.0, 1.0),
        Interval("placement", 1.0, 2.0),
        Interval("prefill_wait", 2.0, 3.0),
        Interval("prefill", 3.0, 7.0),
        Interval("transfer_wait", 3.0, 4.0),  # KV travels while the prompt is computed
        Interval("transfer", 4.0, 8.0),
        Interval("decode_wait", 8.0, 8.5),
        Interval("decode", 8.5, 20.0),
        Interval("finish", 20.0, 21.0),
    ]


MOMENTS = st.dictionaries(st.sampled_from([m.value for m in Moment][1:-1]), st.floats(0.0, 9.0))


@given(MOMENTS)
def test_intervals_end_to_end_fill_the_time_from_received_to_finished(between: dict[str, float]) -> None:
    at_s = {"received": 0.0, **between, "finished": 10.0}
    told = intervals(at_s)
    assert len(told) == len(at_s) - 1
    assert all(0.0 <= one.begin_s <= one.end_s <= 10.0 for one in told)
    reached = 10.0
    for one in reversed(told):
        if one.end_s == reached:
            reached = one.begin_s
    assert reached == 0.0


@given(MOMENTS)
def test_moments_in_order_make_intervals_that_add_up(between: dict[str, float]) -> None:
    order = sorted(between.values())
    names = [m.value for m in Moment if m.value in between]
    told = intervals({"received": 0.0, **dict(zip(names, order, strict=True)), "finished": 10.0})
    assert sum(one.end_s - one.begin_s for one in told) == pytest.approx(10.0)
    assert [one.begin_s for one in told[1:]] == [one.end_s for one in told[:-1]]
