"""The command lines of `fourhop bench`: vLLM's flags, help worth reading, one line for what is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fourhop.bench import commands
from fourhop.bench.config import LoadConfig, MetricsConfig, ResultConfig, SamplingConfig, TargetConfig
from fourhop.bench.dataset_config import DatasetConfig
from fourhop.bench.runs import Plan
from fourhop.cli import execute

VLLM_FLAGS = """
backend base-url host port endpoint model tokenizer header extra-body request-id-prefix num-prompts request-rate
burstiness max-concurrency ramp-up-strategy ramp-up-start-rps ramp-up-end-rps num-warmups ready-check-timeout-sec seed
dataset-name dataset-path random-input-len random-output-len random-range-ratio random-prefix-len
prefix-repetition-prefix-len prefix-repetition-suffix-len prefix-repetition-num-prefixes prefix-repetition-output-len
temperature top-p top-k min-p ignore-eos percentile-metrics metric-percentiles goodput save-result save-detailed
append-result result-dir result-filename label metadata disable-tqdm
"""


@pytest.mark.parametrize("command", ["serve", "sweep", "compare"])
def test_help_has_a_sentence_and_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["bench", command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Usage: fourhop bench {command}" in text
    assert f"Example: fourhop bench {command}" in text


def test_flags_are_named_as_vllm_names_them() -> None:
    configs = (TargetConfig, LoadConfig, DatasetConfig, SamplingConfig, MetricsConfig, ResultConfig)
    names = {field.name.replace("_", "-") for config in configs for field in dataclasses.fields(config)}
    assert set(VLLM_FLAGS.split()) - names == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sarve"], 'Unknown command "sarve"'),
        (["serve", "--goodput", "ttft"], "a limit is NAME:MILLISECONDS, not 'ttft'"),
        (["serve", "--dataset-name", "sonnet"], "--dataset-name"),
        (["serve", "--endpoint", "/v1/chat/completions"], "--backend vllm-chat"),
        (["sweep"], "a sweep needs limits"),
        (["sweep", "--goodput", "ttft:1", "--request-rate", "3"], "a sweep steps the rate itself"),
        (["compare", "--preset", "b200"], "--preset"),
        (["compare", "--rounds", "0"], "rounds must be at least 1"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("fourhop: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_the_line_of_the_guide_is_understood_and_its_status_is_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    line = """serve --model Qwen/Qwen2.5-7B-Instruct --port 8192 --dataset-name random --random-input-len 8192
    --random-output-len 256 --ignore-eos --request-rate 0.4 --num-prompts 100 --percentile-metrics ttft,tpot,itl
    --metric-percentiles 50,99 --goodput ttft:2000 tpot:30 --header A=b=c D=e"""
    plans: list[Plan] = []

    async def keep(plan: Plan, _: object) -> int:
        plans.append(plan)
        return 7

    def run(work: Coroutine[Any, Any, int]) -> int:
        try:
            work.send(None)
        except StopIteration as end:
            return int(end.value)
        raise AssertionError("it waits for something")

    fakes: dict[str, Callable[..., Any]] = {"run_serve": keep, "run": run}
    for name, fake in fakes.items():
        monkeypatch.setattr(commands, name, fake)
    assert execute(["bench", *line.split()]) == 7
    (plan,) = plans
    assert plan.metrics.limits() == {"ttft": 2.0, "tpot": 0.03}
    assert (plan.target.header, plan.load.request_rate, plan.sampling.ignore_eos) == (("A=b=c", "D=e"), 0.4, True)
