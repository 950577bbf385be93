"""A comparison as one HTML page that needs nothing else. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from fourhop.bench.report import Report, comparison_rows, goodput_rows

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2em .7em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
pre { background: #f5f5f5; padding: .7em 1em; overflow-x: auto; }
svg { width: 100%; height: auto; }
.warning { color: #a40; }
"""


def page(report: Report, svg: str | None) -> str:
    """The report; `svg` are its curves, None where they could not be drawn."""
    findings = report.findings
    curves = svg if svg is not None else "<p>The curves need matplotlib: <code>pip install 'fourhop[plot]'</code></p>"
    commands = "\n".join(f"# {setup.name}\n{command}" for setup in findings.setups for command in setup.commands)
    parts = [
        f"<h1>{escape(report.model)}: split or not</h1>",
        *(f"<p>{escape(text)}</p>" for text in report.words()),
        *(f'<p class="warning">Warning: {escape(text)}</p>' for text in findings.warnings()),
        "<h2>Goodput (req/s)</h2>",
        _table(*goodput_rows(report)),
        "<p>DistServe: the greatest rate at which that share of the requests is inside all limits. vLLM: the most "
        "requests inside all limits per second, at any rate.</p>",
        "<h2>Curves</h2>",
        curves,
        "<h2>All values</h2>",
        "<p>Times in ms.</p>",
        _table(*comparison_rows(report)),
        "<h2>Commands</h2>",
        f"<pre>{escape(commands)}</pre>",
        "<h2>Machine</h2>",
        _table(["what", "value"], [[name, value] for name, value in report.machine.items()]),
    ]
    title = escape(f"{report.model}: split or not")
    head = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    return "\n".join([head, f"<style>{STYLE}</style></head><body>", *parts, "</body></html>\n"])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_row("th", head), *(_row("td", row) for row in rows)]
    return "\n".join(["<table>", *lines, "</table>"])


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
