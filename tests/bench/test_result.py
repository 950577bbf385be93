"""The result's keys are those of `vllm bench serve`, and its table reads on a screen."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from fakes.bench_records import METRICS, bad, good, result_of
from fourhop.bench.config import ResultConfig
from fourhop.bench.result import as_json, as_table, file_name
from fourhop.bench.runs import Plan
from fourhop.bench.serve import exit_status, save

VLLM_KEYS = """
date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency
duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput output_throughput
total_token_throughput max_output_tokens_per_s max_concurrent_requests rtfx mean_ttft_ms median_ttft_ms std_ttft_ms
p50_ttft_ms p99_ttft_ms p99.9_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms
std_itl_ms p99_itl_ms
"""
ROWS = ("Successful requests:", "Request goodput (req/s):", "P99 ITL (ms):", "Mean TPOT (ms):", "rendered (ms):")


def test_the_keys_are_vllms_and_times_are_milliseconds() -> None:
    values = as_json(result_of([good(), bad()]), METRICS, ResultConfig(metadata=("gpu=none",)))
    assert [key for key in VLLM_KEYS.split() if key not in values] == []
    assert values["request_rate"] == "inf"
    assert values["median_ttft_ms"] == pytest.approx(100)
    assert values["mean_tpot_ms"] == pytest.approx(10)
    assert values["mean_itl_ms"] == pytest.approx(10)
    assert (values["completed"], values["failed"], values["failures"]) == (1, 1, {"500 broken": 1})
    assert values["request_goodput"] == pytest.approx(0.5)
    assert values["good_share"] == pytest.approx(0.5)
    assert values["gpu"] == "none"
    assert "ttfts" not in values


def test_details_have_an_entry_for_every_request() -> None:
    values = as_json(result_of([good(), bad()]), METRICS, ResultConfig(save_detailed=True))
    lists = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")
    assert all(len(values[name]) == 2 for name in lists)
    assert values["output_lens"] == [9, 0]
    assert values["errors"] == ["", "500 broken"]
    assert values["itls"][1] == []


def test_nothing_behind_a_number_is_null() -> None:
    values = as_json(result_of([]), METRICS, ResultConfig())
    assert values["p99_itl_ms"] is None
    text = json.dumps(values, allow_nan=False)
    assert json.loads(text)["median_ttft_ms"] is None


def test_the_table_has_vllms_rows_and_ours() -> None:
    table = as_table(result_of([good(), bad()]), METRICS)
    for row in (
        "Successful requests:",
        "Request goodput (req/s):",
        "P99 ITL (ms):",
        "Mean TPOT (ms):",
        "rendered (ms):",
    ):
        assert row in table
    assert "failed, 1 times: 500 broken" in table
    assert "warning: the cache was warm" in table
    assert "-" in as_table(result_of([]), METRICS)


def test_the_status_tells_whether_anything_succeeded() -> None:
    assert exit_status(result_of([good(), bad()])) == 0
    assert exit_status(result_of([bad()])) == 1
    assert exit_status(result_of([])) == 1
    assert exit_status(result_of([good()], is_cut=True)) == 130


def test_files_are_named_as_vllm_names_them() -> None:
    result = result_of([good()], request_rate=0.4, max_concurrency=8)
    assert file_name(result, ResultConfig(label="a")) == "a-0.4qps-concurrency8-m-20260102-030405.json"
    assert file_name(result_of([]), ResultConfig()) == "vllm-infqps-m-20260102-030405.json"
    assert file_name(result, ResultConfig(result_filename="x.json")) == "x.json"


def test_a_result_is_written_whole_or_appended(tmp_path: Path) -> None:
    result = result_of([good()], burstiness=math.inf)
    plan = Plan(target=result.target, load=result.load, metrics=METRICS)
    for appends, num_lines in [(False, 1), (False, 1), (True, 2)]:
        config = ResultConfig(result_dir=tmp_path / "new", result_filename="r", append_result=appends)
        lines = save(result, plan, config).read_bytes().splitlines()
        assert len(lines) == num_lines
        assert all(msgspec.json.decode(line)["completed"] == 1 for line in lines)
