"""Where the time to the first token went."""

from __future__ import annotations

from array import array

import pytest

from fourhop.bench.hops import hops_of, median_hops, parse_server_timing
from fourhop.bench.record import Record
from fourhop.wire.moments import server_timing

HEADER = "received;dur=0.0, rendered;dur=2.0, prefill_started;dur=5.0, prefill_done;dur=105.0, first_token;dur=108.0"


def record(header: str, ttft_s: float) -> Record:
    return Record(
        name="r",
        due_s=0,
        ready_s=0,
        sent_s=10.0,
        end_s=11.0,
        chunk_at_s=array("d", [10.0 + ttft_s]),
        moments=parse_server_timing(header),
    )


def test_our_own_header_is_read_back() -> None:
    moments = {"received": 0.0, "rendered": 0.002, "first_token": 0.108}
    assert parse_server_timing(server_timing(moments)) == pytest.approx(moments)


@pytest.mark.parametrize(
    ("header", "moments"),
    [
        ("", {}),
        ("cache;desc=hit, db;dur=53", {}),
        ('rendered;desc="a text";dur=2.5 , first_token ; dur = 4', {"rendered": 0.0025, "first_token": 0.004}),
        ("rendered, first_token;dur=1.2.3, placed;dur=", {}),
    ],
)
def test_other_headers_are_read_as_far_as_they_go(header: str, moments: dict[str, float]) -> None:
    assert parse_server_timing(header) == pytest.approx(moments)


def test_hops_add_up_to_the_clients_ttft() -> None:
    hops = hops_of(record(HEADER, 0.11))
    assert hops == pytest.approx(
        {"rendered": 0.002, "prefill_started": 0.003, "prefill_done": 0.1, "first_token": 0.003, "network": 0.002}
    )
    assert sum(hops.values()) == pytest.approx(0.11)


def test_what_happens_after_the_first_token_is_no_part_of_it() -> None:
    assert "kv_ready" not in hops_of(record(HEADER + ", kv_ready;dur=200", 0.11))


def test_medians_are_over_those_that_tell_and_in_order() -> None:
    records = [record(HEADER, 0.11), record(HEADER, 0.13), record("", 9.0)]
    medians = median_hops(records)
    assert list(medians) == ["rendered", "prefill_started", "prefill_done", "first_token", "network"]
    assert medians["network"] == pytest.approx(0.012)
    assert median_hops([record("", 1.0)]) == {}
