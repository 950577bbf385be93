"""Loading as log lines, and read back from them."""

from __future__ import annotations

import logging

import pytest

from fourhop.service.progress import loading, percent_of


def test_without_a_terminal_loading_is_a_line_for_each_quarter(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with loading("model") as progress:
        for done in range(101):
            progress(done, 100)
    assert caplog.messages == [f"loading percent={percent}" for percent in (0, 25, 50, 75, 100)]


@pytest.mark.parametrize(
    ("line", "percent"),
    [
        ("2026-01-01T00:00:00.000Z info fourhop.service.progress loading percent=75", 75),
        ("info loading percent=75 of something", None),
        ("loaded", None),
    ],
)
def test_a_percentage_is_read_back_from_its_line(line: str, percent: int | None) -> None:
    assert percent_of(line) == percent
