"""What a comparison consists of: fair by construction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourhop.bench.comparison import CompareConfig, alternate, plan_run, plan_setups
from fourhop.bench.launch import Site, site_of
from fourhop.bench.presets import PRESETS
from fourhop.bench.setups import Command, Setup, other, replicas, split, stock_vllm
from fourhop.wire.errors import StartError

UP = """engine-0 | fourhop engine m --port 8101
fourhop is ready: m, each engine does whole requests. Ctrl-C stops everything.
  frontend+router  http://127.0.0.1:8000    pid 11
  engine-0         http://127.0.0.1:8101    pid 12       core 0
  engine-1         http://127.0.0.1:8102    pid 13       core 1
"""


def test_every_setup_has_as_many_engines_and_no_prefix_cache() -> None:
    config = CompareConfig(preset="a100", chunk_budgets="default,512", engine_flags="--block-size 128")
    setups = plan_setups(config, "m")
    assert [setup.name for setup in setups] == ["split 2:1", "3 replicas, default budget", "3 replicas, budget 512"]
    commands = [str(setup.commands[0]) for setup in setups]
    rest = "--block-size 128 --no-enable-prefix-caching --port 0"
    assert commands == [
        f"fourhop up m --prefill 2 --decode 1 {rest}",
        f"fourhop up m --prefill 0 --decode 3 {rest}",
        f"fourhop up m --prefill 0 --decode 3 --max-num-batched-tokens 512 {rest}",
    ]


def test_a_setup_of_the_users_own_has_its_flags() -> None:
    assert str(other("auto=--prefill 1 --decode 1 --x y", "m", ("-z",)).commands[0]) == (
        "fourhop up m --prefill 1 --decode 1 --x y -z --no-enable-prefix-caching --port 0"
    )
    with pytest.raises(ValueError, match="NAME=FLAGS"):
        other("auto", "m", ())


def test_vllm_gets_a_core_or_a_gpu_for_each_replica_and_our_router() -> None:
    setup = stock_vllm("/opt/vllm", "/models/m", "m", [81, 82], has_gpu=False, flags=("--dtype", "float32"))
    first, second, router = (str(command) for command in setup.commands)
    assert first.startswith("env VLLM_CPU_OMP_THREADS_BIND=0 /opt/vllm serve /models/m --served-model-name m --port 81")
    assert "VLLM_CPU_OMP_THREADS_BIND=1" in second and second.endswith("--no-enable-prefix-caching --dtype float32")
    assert router == "fourhop router --decode http://127.0.0.1:81 --decode http://127.0.0.1:82 --port 0"
    on_gpus = stock_vllm("vllm", "m", "m", [81], has_gpu=True, flags=())
    assert "CUDA_VISIBLE_DEVICES=0" in str(on_gpus.commands[0])


def test_a_vllm_that_is_not_there_is_told() -> None:
    with pytest.raises(StartError, match="there is no program"):
        plan_setups(CompareConfig(vllm="/no/such/vllm"), "m")


def test_setups_take_turns_and_their_order_turns_round() -> None:
    setups = [Setup("a", "other", ()), Setup("b", "other", ()), Setup("c", "other", ())]
    order = "".join(setup.name for _, setup in alternate(setups, 3))
    assert order == "abccbaabc"


def test_every_setup_gets_the_same_prompts_and_every_round_and_rate_others() -> None:
    config = CompareConfig(preset="guide", seconds=100)
    plan = plan_run(config, "m", 0.4, 0)
    assert plan == plan_run(config, "m", 0.4, 0)
    seeds = {plan_run(config, "m", rate, number).load.seed for rate in (0.4, 0.5) for number in range(3)}
    assert len(seeds) == 6
    assert (plan.load.num_prompts, plan.load.request_rate) == (40, 0.4)
    assert plan.metrics.limits() == {"ttft": 2.0, "tpot": 0.03}
    assert (plan.dataset.random_input_len, plan.dataset.random_output_len) == (8192, 256)


def test_what_is_given_replaces_the_preset() -> None:
    config = CompareConfig(preset="guide", input_len=7, request_rates="1,2", goodput=("ttft:5",), decode=2)
    found = config.resolve()
    assert (found.num_input, found.rates, found.limits, found.num_decode) == (7, (1.0, 2.0), ("ttft:5",), 2)
    assert found.num_output == PRESETS["guide"].num_output


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk_budgets": "512,x"},
        {"request_rates": "0"},
        {"rounds": 0},
        {"prefill": 0},
        {"seconds": -1.0},
        {"goodput": ("ttft",)},
        {"setup": ("nameless",)},
    ],
)
def test_a_comparison_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|are|is"):
        CompareConfig(**wrong)


def test_the_addresses_are_those_that_are_printed() -> None:
    site = site_of(UP, [])
    assert site == Site("http://127.0.0.1:8000", ("http://127.0.0.1:8101/metrics", "http://127.0.0.1:8102/metrics"))
    router = "2026-01-01T00:00:00Z info fourhop.service.run listening on http://127.0.0.1:9000\n"
    commands = [Command(("env",), "http://127.0.0.1:81"), Command(("fourhop", "router"))]
    assert site_of(router, commands) == Site("http://127.0.0.1:9000", ("http://127.0.0.1:81/metrics",))


def test_the_setups_of_the_posts_are_there() -> None:
    assert set(PRESETS) == {"guide", "guide-small", "a100", "a100-small"}
    assert all(CompareConfig(preset=name, output_dir=Path("x")).resolve() == PRESETS[name] for name in PRESETS)
    assert split("m", 1, 1, ()).kind == "split"
    assert replicas("m", 2, 512, ()).budget == 512
