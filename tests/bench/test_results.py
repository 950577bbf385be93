"""The README's table of results: medians, spreads, and nothing that was not measured."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results", ROOT / "benchmarks" / "results.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look it up
    spec.loader.exec_module(module)
    return module


def result(**runs: list[float | None]) -> dict[str, Any]:
    count = len(next(iter(runs.values())))
    return {
        "date": "2026-01-02",
        "command": "python benchmarks/engine.py",
        "machine": {"processor": "P", "cores": "2 (0,1)", "memory": "4 GiB", "packages": "none"},
        "runs": [{key: values[number] for key, values in runs.items()} for number in range(count)],
    }


def test_a_row_has_median_spread_and_verdict(results: ModuleType) -> None:
    kept = {"engine": result(prefill_over_matmul=[0.9, 0.8, 0.7], batch8_over_1=[5.5, 6.5, 4.0])}
    rows = results.rows_of(kept)[2:]
    assert rows == [
        "| prefill of 512 tokens / the matrix products alone | ≥ 0.85 | 0.8 | 0.7 to 0.9 | missed |",
        "| decode, eight streams / one | ≥ 5 | 5.5 | 4 to 6.5 | reached |",
    ]


def test_what_was_not_measured_is_left_out(results: ModuleType) -> None:
    assert len(results.rows_of({"engine": result(prefill_over_matmul=[None])})) == 2
    (row,) = results.rows_of({"router": result(split_rps=[1234.4])})[2:]
    assert row.endswith("| ≥ 1500 | 1234 | one run | missed |")


def test_only_the_section_is_replaced(results: ModuleType) -> None:
    text = f"before\n{results.BEGIN}old\n{results.END}after\n"
    assert results.replaced(text, "new\n") == f"before\n{results.BEGIN}new\n{results.END}after\n"
    with pytest.raises(ValueError, match="no <!-- results -->"):
        results.replaced("nothing", "new")


def test_the_readme_has_its_section_and_it_is_what_is_kept(results: ModuleType) -> None:
    text = (ROOT / "README.md").read_text()
    assert results.replaced(text, results.section(results.read_results())) == text
