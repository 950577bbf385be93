"""The moments of a request on one clock, and their header."""

from __future__ import annotations

from fourhop.wire.moments import Moment, Timeline, server_timing


def test_moments_come_in_order_and_count_once() -> None:
    timeline = Timeline(10.0)
    timeline.mark(Moment.FINISHED, 13.0)
    timeline.mark(Moment.PLACED, 10.5)
    timeline.mark(Moment.PLACED, 12.0)
    assert timeline.since_received() == {"received": 0.0, "placed": 0.5, "finished": 3.0}


def test_a_hop_s_moments_move_to_this_clock() -> None:
    timeline = Timeline(10.0)
    timeline.merge({"received": 0.0, "prefill_started": 0.25}, 11.0)
    assert timeline.since_received() == {"received": 0.0, "prefill_started": 1.25}


def test_the_header_is_in_milliseconds() -> None:
    assert server_timing({"received": 0.0, "placed": 0.0123}) == "received;dur=0.0, placed;dur=12.3"
