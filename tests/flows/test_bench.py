"""`fourhop bench serve` and `sweep` against a real server, as a user types them."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fakes.models import write_tiny_checkpoint
from flows.servers import running, url_of
from fourhop.cli import execute

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LENGTHS = ("--random-input-len", "40", "--random-output-len", "8", "--temperature", "0")
LOAD = (*LENGTHS, "--num-prompts", "12")


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")
    with running(("serve", str(model), "--port", "0", "--kv-cache-bytes", "50000000")) as (server,):
        yield url_of(server)


def bench(*arguments: str) -> Done:
    """The command line, run in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
        status = execute(["bench", *arguments])
    return Done(status, output.getvalue(), errors.getvalue())


def saved(folder: Path) -> dict[str, Any]:
    (file,) = folder.iterdir()
    values: dict[str, Any] = json.loads(file.read_text())
    return values


@pytest.mark.parametrize(("backend", "seed"), [("vllm", "1"), ("generate", "2"), ("vllm-chat", "3")])
def test_a_run_counts_every_token(url: str, backend: str, seed: str, tmp_path: Path) -> None:
    limits = ("--goodput", "ttft:100000", "tpot:100000")
    save = ("--save-detailed", "--result-dir", str(tmp_path), "--seed", seed)
    done = bench("serve", "--base-url", url, "--backend", backend, *LOAD, "--request-rate", "20", *limits, *save)
    assert done.returncode == 0, done.stdout + done.stderr
    values = saved(tmp_path)
    assert (values["completed"], values["failed"]) == (12, 0)
    assert values["total_output_tokens"] == 12 * 8
    assert values["token_count_sources"] == {"ids": 12}
    assert values["token_count_mismatches"] == values["itl_unknown_requests"] == 0
    assert all(len(itls) <= 7 for itls in values["itls"])
    assert values["good_share"] == 1
    assert {"rendered", "prefill_done", "network"} <= values["median_ttft_hops_ms"].keys() or backend == "generate"
    if backend != "vllm-chat":
        assert values["total_input_tokens"] == 12 * 40
        assert values["input_lens"] == [40] * 12
    assert values["prefix_cache_hit_rate"] == 0


def test_the_same_seed_again_meets_the_prefix_cache_and_says_so(url: str) -> None:
    """Case 91."""
    for number in ("1", "2"):
        done = bench("serve", "--base-url", url, *LOAD, "--seed", "9")
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("came from the prefix cache" in done.stdout) is (number == "2")


def test_a_warm_up_is_neither_counted_nor_cached(url: str) -> None:
    done = bench("serve", "--base-url", url, *LOAD, "--seed", "10", "--num-warmups", "3")
    assert "Successful requests:                                    12" in done.stdout
    assert "came from the prefix cache" not in done.stdout


def test_conversations_grow(url: str, tmp_path: Path) -> None:
    turns = ("--dataset-name", "multi_turn", "--num-turns", "3", "--turn-input-len", "5", "--seed", "11")
    save = ("--save-detailed", "--result-dir", str(tmp_path), "--num-prompts", "2", "--max-concurrency", "1")
    done = bench("serve", "--base-url", url, *LENGTHS, *turns, *save)
    assert done.returncode == 0, done.stdout + done.stderr
    values = saved(tmp_path)
    assert sorted(values["input_lens"]) == [40, 40, 53, 53, 66, 66]
    assert values["median_ttft_by_turn_ms"].keys() == {"0", "1", "2"}
    assert values["prefix_cache_hit_rate"] > 0


def test_a_sweep_tells_the_goodput(url: str, tmp_path: Path) -> None:
    limits = ("--goodput", "ttft:100000", "tpot:100000")
    rates = ("--request-rates", "10,20", "--save-result", "--result-dir", str(tmp_path))
    done = bench("sweep", "--base-url", url, *LOAD, "--seed", "12", *limits, *rates)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(DistServe): 20.000 req/s" in done.stdout
    values = saved(tmp_path)
    assert (values["goodput_distserve"], values["failing_rate"]) == (20, None)
    assert [point["prefix_cache_hit_rate"] for point in values["points"]] == [0, 0]


def test_where_nothing_answers_the_status_is_not_zero() -> None:
    done = bench("serve", "--port", "1", "--model", "x", *LOAD)
    assert done.returncode == 1
    assert done.stderr.startswith("fourhop: no model at x")
