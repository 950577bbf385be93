"""What is told of a comparison: medians over rounds, a table, JSON, a page, a figure."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from fakes.bench_records import record, result_of
from fourhop.bench import plot
from fourhop.bench.comparison import CompareConfig
from fourhop.bench.findings import Findings, Measured, best, cell_of, ratio
from fourhop.bench.page import page
from fourhop.bench.report import Report, comparison_json, comparison_table, goodput_table
from fourhop.bench.setups import Setup, replicas, split

SPLIT, WHOLE = split("m", 1, 1, ()), replicas("m", 2, None, ())
MACHINE = {"processor": "a <fast> one", "cores": "2 (0,1)"}


def measured(setup: Setup, rate: float, number: int, itl_s: float) -> Measured:
    """A run of one answer with chunks of one token, this far apart."""
    result = result_of([record(0.0, 0.1, 0.1 + itl_s, 0.1 + 2 * itl_s)])
    return Measured(setup, rate, number, result)


def report(runs: list[Measured] | None = None) -> Report:
    if runs is None:
        runs = [
            measured(setup, rate, number, itl_s * (1 + number))
            for number in range(3)
            for rate in (1.0, 2.0)
            for setup, itl_s in ((SPLIT, 0.01), (WHOLE, 0.02 * rate))
        ]
    return Report(CompareConfig(goodput=("ttft:2000", "tpot:30")), "org/<m>", Findings(runs), MACHINE)


def test_values_are_medians_over_the_rounds() -> None:
    cell = report().findings.cell(WHOLE, 2.0, "itl_p50")
    assert (cell.median, cell.least, cell.greatest) == pytest.approx((80, 40, 120))
    rates, medians = zip(*report().findings.curve(SPLIT, "itl_p50"), strict=True)
    assert rates == (1.0, 2.0)
    assert medians == pytest.approx((20, 20))


def test_a_value_that_no_round_has_is_none() -> None:
    assert report().findings.cell(SPLIT, 9.0, "itl_p50").median is None
    assert cell_of([None, None]).median is None
    assert cell_of([None, 3.0]).median == 3.0
    assert (ratio(1.0, None), ratio(None, 1.0), ratio(1.0, 0.0), ratio(3.0, 2.0)) == (None, None, None, 1.5)
    assert (best([None, 2.0, 1.0], min), best([None], max)) == (1.0, None)


def test_goodput_is_told_by_both_definitions() -> None:
    findings = report().findings
    assert findings.goodputs(SPLIT, 0.9) == pytest.approx((2.0, 0.5))
    assert findings.goodputs(WHOLE, 0.9)[0] is None
    assert "split 1:1" in goodput_table(report())


def test_the_table_has_a_row_for_every_setup_at_every_rate() -> None:
    lines = comparison_table(report()).splitlines()
    assert len(lines) == 2 + 4
    assert lines[2].split()[:3] == ["split", "1:1", "1"]


def test_the_json_holds_every_run_with_its_commands() -> None:
    values = json.loads(json.dumps(comparison_json(report()), allow_nan=False))
    assert len(values["runs"]) == 12
    assert values["setups"][0]["commands"][0].startswith("fourhop up m --prefill 1 --decode 1")
    assert values["setups"][1]["rates"]["2"]["itl_p50"] == pytest.approx([80, 40, 120])
    assert values["limits_ms"] == {"ttft": 2000, "tpot": 30}


class Elements(HTMLParser):
    """The elements of a page, and the addresses that it would load from."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href") and (value or "#")[0] != "#"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_loads_nothing() -> None:
    elements = Elements()
    elements.feed(page(report(), None))
    assert elements.open == []
    assert elements.loads == []
    for said in ("org/<m>", "a <fast> one", "fourhop up m --prefill 0 --decode 2", "the cache was warm"):
        assert said in elements.text


@pytest.mark.slow
def test_the_figure_is_drawn_and_goes_into_the_page() -> None:
    pytest.importorskip("matplotlib")
    figure = plot.draw(report())
    assert plot.as_png(figure).startswith(b"\x89PNG")
    svg = plot.as_svg(figure)
    assert svg.startswith("<svg") and svg.rstrip().endswith("</svg>")
    assert svg in page(report(), svg)
    titles = [axes.get_title() for axes in figure.axes]
    assert {panel.title for panel in plot.PANELS} <= set(titles)


def test_a_comparison_without_runs_is_still_told() -> None:
    empty = report([])
    assert comparison_table(empty).splitlines()[0].startswith("set-up")
    assert "<h1>" in page(empty, None)
    assert comparison_json(empty)["runs"] == []
