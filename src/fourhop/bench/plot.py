"""The curves of a comparison, drawn by matplotlib, which is an optional package: `fourhop[plot]`."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fourhop.bench.report import Report
from fourhop.bench.search import ATTAINMENT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Panel:
    """One diagram: values over the request rate; the second of two is drawn dotted. `limit` is a metric's name."""

    title: str
    values: Sequence[str]
    limit: str | None = None
    is_log: bool = True


PANELS = (
    Panel("ITL, median and p99 (ms)", ("itl_p50", "itl_p99")),
    Panel("TTFT, median and p99 (ms)", ("ttft_p50", "ttft_p99"), "ttft"),
    Panel("TPOT, median and p99 (ms)", ("tpot_p50", "tpot_p99"), "tpot"),
    Panel("inside the limits (%)", ("inside",), "share", is_log=False),
    Panel("goodput (req/s)", ("goodput",), is_log=False),
)
STYLES = ("-", ":")


def is_available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(report: Report) -> Figure:
    """A diagram for each panel, a colour for each set-up, limits dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8), layout="constrained")
    axes = figure.subplots(2, 3).flatten()
    limits = {name: limit * 1000 for name, limit in report.limits().items()} | {"share": ATTAINMENT * 100}
    for panel, place in zip(PANELS, axes, strict=False):
        _draw_panel(place, panel, report, limits)
    last = axes[len(PANELS)]
    last.axis("off")
    last.legend(*axes[0].get_legend_handles_labels(), loc="upper left", frameon=False)
    last.text(0.02, 0.02, "dotted: p99; dashed: limit\nbars: least and greatest of the rounds", fontsize=9)
    figure.suptitle(f"{report.model} on {report.machine['processor']}, {report.machine['cores']} cores")
    return figure


def _draw_panel(axes: Axes, panel: Panel, report: Report, limits: Mapping[str, float]) -> None:
    findings = report.findings
    for number, setup in enumerate(findings.setups):
        for name, style in zip(panel.values, STYLES, strict=False):
            curve = findings.curve(setup, name)
            cells = [findings.cell(setup, rate, name) for rate, _ in curve]
            spread = [
                [value - (cell.least or 0.0) for (_, value), cell in zip(curve, cells, strict=True)],
                [(cell.greatest or 0.0) - value for (_, value), cell in zip(curve, cells, strict=True)],
            ]
            label = setup.name if style == STYLES[0] else None
            line: dict[str, Any] = {"color": f"C{number}", "linestyle": style, "marker": "o", "markersize": 4}
            axes.errorbar(
                [rate for rate, _ in curve], [value for _, value in curve], yerr=spread, label=label, capsize=2, **line
            )
    if panel.limit is not None and panel.limit in limits:
        axes.axhline(limits[panel.limit], color="grey", linestyle="--", linewidth=1)
    if panel.is_log:
        axes.set_yscale("log")
    axes.set_title(panel.title)
    axes.set_xlabel("request rate (req/s)")
    axes.grid(alpha=0.3)


def as_png(figure: Figure) -> bytes:
    return _saved(figure, "png")


def as_svg(figure: Figure) -> str:
    """An `svg` element, to be put into a page."""
    text = _saved(figure, "svg").decode()
    return text[text.index("<svg") :]


def _saved(figure: Figure, kind: str) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=120)
    return file.getvalue()
