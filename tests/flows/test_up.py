"""`fourhop up` on real weights, asked through OpenAI's own client."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam

from flows.pipelines import Pipeline, children_of, is_alive, metric, until, up
from flows.servers import SMOLLM2, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    with up() as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def client(pipeline: Pipeline) -> OpenAI:
    return OpenAI(base_url=f"{pipeline.url}/v1", api_key="none", max_retries=0)


def is_right(usage: CompletionUsage | None) -> bool:
    """37 tokens of prompt; the answer is 7 words and marks, and the end of turn."""
    return usage is not None and (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (37, 8, 45)


def test_a_whole_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=SMOLLM2, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert is_right(answer.usage)


def test_a_streamed_answer(client: OpenAI) -> None:
    stream = client.chat.completions.create(model=SMOLLM2, messages=QUESTION, temperature=0, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert len(chunks) > 4, "a chunk for each token, or nearly"
    assert all(chunk.usage is None for chunk in chunks)


def test_a_streamed_answer_with_usage(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=SMOLLM2, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert is_right(last.usage)


def test_the_log_shows_two_engines(pipeline: Pipeline, client: OpenAI) -> None:
    client.chat.completions.create(model=SMOLLM2, messages=QUESTION, temperature=0)
    for line in pipeline.server.wait_for(r" fourhop\.request request (.*)"):
        fields = dict(re.findall(r"(\w+)=(\S+)", line))
        assert fields["outcome"] == "finished"
        assert fields["reason"] == "split"
        assert fields["prefill"] == pipeline.urls["prefill-0"]
        assert fields["decode"] == pipeline.urls["decode-0"]


def test_nothing_is_held_at_rest(pipeline: Pipeline, client: OpenAI) -> None:
    client.chat.completions.create(model=SMOLLM2, messages=QUESTION, temperature=0)
    until(lambda: all(metric(url, "fourhop:held_blocks") == 0 for url in pipeline.urls.values()), 10)


def test_ctrl_c_ends_everything() -> None:
    """What is shared lives in memory without a name, so that it ends with the processes, however they end."""
    with up("--connector", "tcp") as pipeline:
        client = OpenAI(base_url=f"{pipeline.url}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(model=SMOLLM2, messages=QUESTION, temperature=0)
        assert answer.choices[0].message.content == ANSWER
        assert len(pipeline.pids) == 3
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pipeline.pids.values()]
        assert not [line for text in maps for line in text.splitlines() if "/dev/shm" in line]
    assert not [name for name, pid in pipeline.pids.items() if is_alive(pid)]


@pytest.mark.parametrize("pattern", [r"# on core", r"progress loading"])
def test_ctrl_c_while_it_starts(pattern: str) -> None:
    server = Server("up", "--port", "0")
    server.wait_for(pattern)
    pids = children_of(server.process.pid)
    server.process.send_signal(signal.SIGINT)
    server.process.wait(60)
    assert "Traceback" not in server.output, server.output
    assert "engine_killed" not in server.output, server.output
    assert server.stop() == 0
    assert not [pid for pid in pids if is_alive(pid)]


def test_engines_die_with_up() -> None:
    server = Server("up", "--port", "0")
    server.wait_for("fourhop is ready")
    pids = children_of(server.process.pid)
    assert len(pids) == 2
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: not any(is_alive(pid) for pid in pids), 10)
