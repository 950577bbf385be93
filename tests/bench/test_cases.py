"""Cases 86 to 92 of the case list, as a user of `fourhop bench` meets them: what is printed, saved and warned of.

Where each input of a case is held:

    86  here, as saved; `test_drive` (records), `test_measure` (the peak)
    88  here: every cut of every form, with its time stamps; `test_reading`, `wire/test_sse`, `tokens/test_client`
    89  here, (a) to (g), as saved, with the exit status; `test_drive`, `test_measure`, `test_result`
    91  here against a server that caches; `test_cache`, `test_datasets`, `test_search`; `flows/test_bench` against ours
    92  here; `test_drive`, `test_reading`, `test_datasets`; `flows/test_bench` against ours
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from itertools import accumulate
from typing import Any

import pytest

from bench.test_drive import FAILURES, always, drive, job
from fakes.bench_records import METRICS, result_of
from fakes.caching_server import CachingServer
from fakes.scripted_server import DONE, ScriptedServer, text, tokens, usage
from fakes.vocabulary import LetterVocabulary
from fourhop.bench.config import LoadConfig, MetricsConfig, ResultConfig, TargetConfig
from fourhop.bench.dataset_config import DatasetConfig
from fourhop.bench.drive import Run
from fourhop.bench.measure import summarize
from fourhop.bench.reading import Reading
from fourhop.bench.result import Result, as_json, as_table
from fourhop.bench.runs import Bench, Plan
from fourhop.bench.search import SweepConfig
from fourhop.bench.serve import exit_status
from fourhop.bench.sweep import sweep_points
from fourhop.tokens.connection import open_session

METRIC_NAMES = ("ttft", "tpot", "itl", "chunk_gap", "e2el")
ALL = MetricsConfig(percentile_metrics=",".join(METRIC_NAMES), goodput=("ttft:1000", "tpot:1000"))


def saved(result: Result, metrics: MetricsConfig = ALL) -> dict[str, Any]:
    """The result as its file has it; there is no NaN and no infinity in it."""
    values: dict[str, Any] = json.loads(json.dumps(as_json(result, metrics, ResultConfig()), allow_nan=False))
    return values


def result_of_run(run: Run) -> Result:
    summary = summarize(run.records, run.duration_s, limits=ALL.limits(), metrics=METRIC_NAMES, percentiles=(50, 99))
    return dataclasses.replace(result_of(run.records), summary=summary)


def drive_once(*reads: tuple[float, bytes]) -> Run:
    return drive(ScriptedServer(always(*reads)), [(0.0, job(3, num_output=9))])


def test_case_86_what_is_saved_of_chunks_of_four_tokens() -> None:
    last = tokens(6, 7, 8, 9, finish="length") + DONE
    values = saved(result_of_run(drive_once((0.1, tokens(1)), (0.14, tokens(2, 3, 4, 5)), (0.18, last))))
    for name, number in [("ttft", 100), ("tpot", 10), ("itl", 10), ("chunk_gap", 40), ("e2el", 180)]:
        assert values[f"median_{name}_ms"] == pytest.approx(number), name
    assert values["p99_itl_ms"] == pytest.approx(10)
    assert values["max_output_tokens_per_s"] == 9


# Three events, with spaces to lose and characters of two, three and four bytes, and what ends them.
EVENTS = [text(" h\u00e9 "), text("\u4e2d  "), text(" \U0001f44b", "length"), usage(3, 3), DONE]
SAID = " h\u00e9 \u4e2d   \U0001f44b"
FORMS = {
    "LF": lambda data: data,
    "no space": lambda data: data.replace(b"data: ", b"data:"),
    "CRLF": lambda data: data.replace(b"\n", b"\r\n"),
    "comments and fields": lambda data: b": ping\nevent: m\nid: 7\n" + data,
    "two data lines": lambda data: data.replace(b'"choices": ', b'"choices":\ndata: ', 1),
}


def test_case_88_the_events_hold_what_a_cut_can_break() -> None:
    assert all(character.encode() in b"".join(EVENTS) for character in "\u00e9\u4e2d\U0001f44b")


@pytest.mark.parametrize("form", FORMS)
def test_case_88_every_cut_leaves_text_counts_and_time_stamps(form: str) -> None:
    """An event has the time stamp of the byte that completes it."""
    events = [FORMS[form](each) for each in EVENTS]
    stream, ends = b"".join(events), list(accumulate(len(each) for each in events))[:3]
    for cut in range(len(stream) + 1):
        reading = Reading()
        reading.feed(stream[:cut], 1.0)
        reading.feed(stream[cut:], 2.0)
        reading.close(3.0)
        assert (reading.failure, reading.text, reading.said(len)) == (None, SAID, {"usage": 3})
        assert list(reading.chunk_at_s) == [1.0 if end <= cut else 2.0 for end in ends], cut


NONE_SUCCEEDS = {name: FAILURES[name] for name in ("no tokens", "error inside", "HTTP 500")}


@pytest.mark.parametrize("name", NONE_SUCCEEDS)
def test_case_89_a_to_c_and_e_are_failures_with_a_cause_and_no_latency(name: str) -> None:
    script_of, cause = NONE_SUCCEEDS[name]
    result = result_of_run(drive(ScriptedServer(script_of), [(0.0, job(1)), (0.5, job(1))]))
    values = saved(result)
    assert (values["completed"], values["failed"], values["failures"]) == (0, 2, {cause: 2})
    assert all(values[f"{kind}_{metric}_ms"] is None for kind in ("median", "p99") for metric in METRIC_NAMES)
    assert (values["request_goodput"], values["good_share"], values["total_output_tokens"]) == (0, 0, 0)
    assert exit_status(result) == 1
    assert f"failed, 2 times: {cause}" in as_table(result, ALL)


def test_case_89_d_a_single_token_has_no_tpot_and_no_itl() -> None:
    result = result_of_run(drive_once((0.5, tokens(1, finish="length") + DONE)))
    values = saved(result)
    assert (values["median_ttft_ms"], values["median_e2el_ms"]) == (pytest.approx(500), pytest.approx(500))
    assert (values["median_tpot_ms"], values["p99_itl_ms"]) == (None, None)
    assert (values["good_share"], exit_status(result)) == (1, 0)


def test_case_89_f_no_requests_are_no_success() -> None:
    result = result_of_run(drive(ScriptedServer(always()), []))
    values = saved(result)
    assert (values["median_ttft_ms"], values["p99_itl_ms"], values["request_throughput"]) == (None, None, None)
    assert exit_status(result) == 1


def test_case_89_g_an_end_that_is_its_start_divides_by_nothing() -> None:
    values = saved(result_of_run(drive_once((0.0, tokens(1) + tokens(2, finish="length") + DONE))))
    assert (values["duration"], values["completed"]) == (0, 1)
    assert (values["median_ttft_ms"], values["median_tpot_ms"], values["request_throughput"]) == (0, 0, None)


def measure(server: CachingServer, *plans: Plan) -> list[Result]:
    """Runs against one server, one after the other."""

    async def work() -> list[Result]:
        async with server.serving() as url, open_session() as session:
            bench = Bench(session, "m", "m", LetterVocabulary())
            return [await bench.run(at(plan, url)) for plan in plans]

    return asyncio.run(work())


def at(plan: Plan, url: str) -> Plan:
    return dataclasses.replace(plan, target=dataclasses.replace(plan.target, base_url=url), shows_progress=False)


DATASET = DatasetConfig(random_input_len=48, random_output_len=12)


def plan(seed: int = 0, backend: Any = "vllm", dataset: DatasetConfig = DATASET, **load: Any) -> Plan:
    target, loads = TargetConfig(backend=backend), LoadConfig(num_prompts=4, seed=seed, **load)
    return Plan(target=target, load=loads, dataset=dataset, metrics=METRICS)


def hints(result: Result) -> list[str]:
    return [text for text in result.warnings if "prefix cache" in text]


def test_case_91_a_seed_that_is_used_again_is_told() -> None:
    first, again, other = measure(CachingServer(), plan(1), plan(1), plan(2))
    assert [result.cache_hit_rate for result in (first, again, other)] == [0, 1, 0]
    assert [len(hints(result)) for result in (first, again, other)] == [0, 1, 0]
    assert saved(again)["prefix_cache_hit_rate"] == 1
    assert "100.0% of the prompt tokens came from the prefix cache" in as_table(again, METRICS)


def test_case_91_a_warm_up_is_disjoint_and_excluded() -> None:
    server = CachingServer()
    (result,) = measure(server, plan(1, num_warmups=3))
    assert (len(server.prompts), len(result.records)) == (7, 4)
    assert (server.num_hit, result.cache_hit_rate, hints(result)) == (0, 0, [])


def test_case_91_the_points_of_a_sweep_share_no_prompt() -> None:
    server = CachingServer()
    sweep = SweepConfig(request_rates="1000,2000,4000", seconds=0.004)

    async def work() -> list[Result]:
        async with server.serving() as url, open_session() as session:
            bench = Bench(session, "m", "m", LetterVocabulary())
            return [point.result async for point in sweep_points(bench.run, at(plan(1), url), sweep)]

    results = asyncio.run(work())
    assert [len(result.records) for result in results] == [4, 8, 16]
    assert [result.cache_hit_rate for result in results] == [0, 0, 0]
    assert server.num_hit == 0


def told(result: Result) -> list[str]:
    """The warnings, but for the client's own lateness: this machine may be busy."""
    return [text for text in result.warnings if "core of its own" not in text]


@pytest.mark.parametrize(
    ("server", "sources", "warning"),
    [
        (CachingServer(tells_ids=False), {"usage": 4}, None),
        (
            CachingServer(tells_ids=False, tells_usage=False),
            {"estimate": 4},
            "output tokens of 4 answers are estimates",
        ),
        (CachingServer(usage_error=2), {"ids": 4}, "4 answers have another number of token ids than their usage says"),
    ],
    ids=["usage", "neither", "both, which disagree"],
)
def test_case_92_where_a_number_of_tokens_comes_from(
    server: CachingServer, sources: dict[str, int], warning: str | None
) -> None:
    """Twelve tokens of one space each; the estimate is marked as one."""
    (result,) = measure(server, plan())
    values = saved(result)
    assert values["token_count_sources"] == sources
    assert values["total_output_tokens"] == 4 * 12
    assert any(warning in text for text in told(result)) if warning else told(result) == []


@pytest.mark.parametrize(
    "dataset",
    [
        DATASET,
        DatasetConfig(random_input_len=64, random_prefix_len=64, random_output_len=1),
        DatasetConfig(
            dataset_name="prefix_repetition",
            prefix_repetition_prefix_len=64,
            prefix_repetition_suffix_len=64,
            prefix_repetition_num_prefixes=1,
        ),
    ],
    ids=["random", "prefix", "repetition"],
)
def test_case_92_lengths_are_exact_where_ids_are_sent(dataset: DatasetConfig) -> None:
    """Prefix and suffix too, though these ids would merge if their text was encoded again."""
    server = CachingServer()
    (result,) = measure(server, plan(dataset=dataset))
    lengths = {len(prompt) for prompt in server.prompts}
    assert lengths == ({48} if dataset is DATASET else {128})
    assert saved(result)["input_length_differs"] == 0
    if dataset is not DATASET:
        assert len({tuple(prompt[:64]) for prompt in server.prompts}) == 1
        assert len({tuple(prompt[64:]) for prompt in server.prompts}) == 4


def test_case_92_a_templates_tokens_are_reported() -> None:
    dataset = dataclasses.replace(DATASET, random_output_len=1)
    (result,) = measure(CachingServer(template_tokens=8), plan(backend="openai-chat", dataset=dataset))
    num_letters = sum(record.num_input - 8 for record in result.records)
    values = saved(result)
    assert values["total_input_tokens"] == num_letters + 4 * 8
    assert values["input_length_differs"] == 4
    assert any("4 prompts have another length than was asked for" in text for text in result.warnings)
