"""The guide's programs run as they are; only MODEL and the URLs are ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fakes.models import write_tiny_checkpoint
from flows.servers import running, url_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SEED = 9
"""Of weights whose greedy answer has thinking, an end to it after 129 tokens, and an answer."""

ENDS = [257, 42]
"""EOS tokens: the usual one, and one that comes as the 368th."""

PROGRAMS = Path(__file__).parent / "guide"
PARSERS = ("--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Greedy by default, so that programs that ask for no temperature agree."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=SEED, max_position_embeddings=4096)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "eos_token_id": ENDS}))
    return str(folder)


@pytest.fixture(scope="module")
def urls(model: str) -> Iterator[dict[str, str]]:
    """A render tier and three engines, one alone and two that hand over."""
    engine = ("engine", model, "--port", "0", "--num-threads", "1")
    commands = {
        "RENDER": ("frontend", model, "--port", "0", *PARSERS),
        "ENGINE": engine,
        "PREFILL": (*engine, "--kv-transfer-config", '{"kv_connector": "shm", "kv_role": "kv_producer"}'),
        "DECODE": (*engine, "--kv-transfer-config", '{"kv_connector": "shm", "kv_role": "kv_consumer"}'),
    }
    with running(*commands.values()) as servers:
        yield {"MODEL": model} | {name: url_of(server) for name, server in zip(commands, servers, strict=True)}


def run(program: str, urls: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / program)],
        env={**os.environ, **urls},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed(output: str) -> tuple[str, str]:
    """Reasoning and content, as the guide's programs print them."""
    reasoning, _, content = output.removesuffix("\n").partition("\n---\n")
    return reasoning, content


@pytest.fixture(scope="module")
def three_hops(urls: dict[str, str]) -> tuple[str, str]:
    return printed(run("three_hops.py", urls))


def test_three_hops(three_hops: tuple[str, str]) -> None:
    assert all(three_hops), "there is thinking, and an answer"


def test_streamed_three_hops(urls: dict[str, str], three_hops: tuple[str, str]) -> None:
    assert run("streamed_three_hops.py", urls) == three_hops[1]


def test_four_hops(urls: dict[str, str], three_hops: tuple[str, str]) -> None:
    before = transfers(urls["DECODE"])
    assert printed(run("four_hops.py", urls)) == three_hops
    assert transfers(urls["DECODE"]) == before + 1


def test_two_steps_of_an_openai_client(model: str, three_hops: tuple[str, str]) -> None:
    serve = ("serve", model, "--port", "0", "--num-threads", "1", *PARSERS, "--allow-client-kv-transfer")
    transfer = ("--kv-transfer-config", '{"kv_connector": "tcp"}')
    with running((*serve, *transfer), (*serve, *transfer)) as (prefill, decode):
        urls = {"MODEL": model, "PREFILL": url_of(prefill), "DECODE": url_of(decode)}
        assert run("two_step_openai.py", urls).removesuffix("\n") == three_hops[1]
        assert transfers(urls["DECODE"]) == 1


def transfers(url: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    (line,) = [line for line in lines if line.startswith("fourhop:kv_transfers_total{")]
    return float(line.rpartition(" ")[2])
