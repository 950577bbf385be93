"""Stock vLLM engines, CPU build, nothing patched: `fourhop up --engine vllm`, with KV over NIXL. `make test-vllm`.

A start takes a minute or two and about 4 GB, so that all tests share one; those that kill an engine come last.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from flows.pipelines import Pipeline, is_alive, metric, until, up
from flows.servers import SMOLLM2

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
PATIENCE_S = 600.0
"""A vLLM compiles what it samples with when it is first asked for, which takes a busy machine a minute or two."""
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pipeline(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    python = request.config.getoption("--vllm-python")
    if python is None:
        pytest.skip("no --vllm-python PATH; see `make test-vllm`")
    os.environ["HF_HUB_OFFLINE"] = "1"
    with up("--engine", "vllm", "--vllm-python", str(python), "--max-model-len", "2048") as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def client(pipeline: Pipeline) -> OpenAI:
    return OpenAI(base_url=f"{pipeline.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def prompt_of(length: int) -> list[int]:
    """Ids of ordinary tokens; none is the beginning of another, so that no engine knows it already."""
    return [1000 + (37 * place + 101 * length) % 20000 for place in range(length)]


def generate(url: str, prompt: list[int], max_tokens: int, **params: Any) -> list[int]:
    """The tokens that a server makes of a prompt."""
    body = {"token_ids": prompt, "sampling_params": GREEDY | {"max_tokens": max_tokens} | params}
    answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def holds(pipeline: Pipeline, state: str) -> float:
    """How many holds ended this way."""
    lines = httpx.get(f"{pipeline.url}/metrics").text
    found = re.search(rf'^fourhop_router_ended_holds{{state="{state}"}} (\S+)$', lines, re.MULTILINE)
    assert found is not None
    return float(found[1])


def num_transfers(pipeline: Pipeline) -> float:
    return metric(pipeline.urls["decode-0"], "vllm:nixl_xfer_time_seconds_count")


def is_free(pipeline: Pipeline, name: str) -> bool:
    """True if an engine has no request and no block in use."""
    url = pipeline.urls[name]
    return not any(
        metric(url, f"vllm:{gauge}")
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    )


def test_a_whole_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=SMOLLM2, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (37, 8)


def test_a_streamed_answer(client: OpenAI) -> None:
    stream = client.chat.completions.create(model=SMOLLM2, messages=QUESTION, temperature=0, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]


def test_kv_moves_over_nixl(pipeline: Pipeline) -> None:
    pulled, transfers = holds(pipeline, "pulled"), num_transfers(pipeline)
    generate(pipeline.url, prompt_of(700), 4)
    assert holds(pipeline, "pulled") == pulled + 1
    until(lambda: num_transfers(pipeline) == transfers + 1, 30)
    until(lambda: is_free(pipeline, "prefill-0"), 30)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 600])
def test_a_split_request_makes_the_tokens_of_one_vllm(pipeline: Pipeline, length: int) -> None:
    """Lengths around those of a block, which has 128 tokens on a CPU."""
    prompt = prompt_of(length)
    assert generate(pipeline.url, prompt, 6) == generate(pipeline.urls["prefill-0"], prompt, 6)


@pytest.mark.parametrize("params", [{"temperature": 0.8, "seed": 7}, {"temperature": 1.0, "top_p": 0.9, "seed": 11}])
def test_sampled_with_a_seed_it_does_too(pipeline: Pipeline, params: dict[str, Any]) -> None:
    prompt = prompt_of(300)
    assert generate(pipeline.url, prompt, 6, **params) == generate(pipeline.urls["prefill-0"], prompt, 6, **params)


def test_several_choices_and_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=SMOLLM2, messages=QUESTION, n=2, temperature=0, max_tokens=8, logprobs=True, top_logprobs=2
    )
    assert [choice.message.content for choice in answer.choices] == [ANSWER, ANSWER]
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) >= 7
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_a_json_answer(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    answer = client.chat.completions.create(
        model=SMOLLM2,
        messages=QUESTION,
        temperature=0,
        max_tokens=40,
        extra_body={"structured_outputs": {"json": schema}},
    )
    assert re.fullmatch(r'\s*\{\s*"city"\s*:\s*"[^"]*"\s*\}\s*', answer.choices[0].message.content or "")


@pytest.mark.parametrize("num_read", [0, 1, 5])
def test_a_client_that_leaves_frees_both_engines(pipeline: Pipeline, num_read: int) -> None:
    body = {"token_ids": prompt_of(900), "sampling_params": GREEDY | {"max_tokens": 800}, "stream": True}
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.stream(
            "POST", f"{pipeline.url}/inference/v1/generate", json=body, timeout=PATIENCE_S if num_read else 0.3
        ) as answer,
    ):
        lines = answer.iter_lines()
        for _ in range(2 * num_read):
            next(lines)
    for name in ("prefill-0", "decode-0"):
        until(lambda name=name: is_free(pipeline, name), 45)  # type: ignore[misc]
    assert metric(pipeline.url, "fourhop_router_leaked_holds") == 0
    assert generate(pipeline.url, prompt_of(20), 4) == generate(pipeline.urls["prefill-0"], prompt_of(20), 4)


def test_bad_input_is_refused_and_the_engines_stay_well(pipeline: Pipeline) -> None:
    for params in ({"temperature": -1.0}, {"max_tokens": 0}, {"top_p": 2.0}):
        body = {"token_ids": [1, 2], "sampling_params": params}
        assert httpx.post(f"{pipeline.url}/inference/v1/generate", json=body).status_code == 400
    body = {"token_ids": prompt_of(3000), "sampling_params": {"max_tokens": 4}}
    assert httpx.post(f"{pipeline.url}/inference/v1/generate", json=body).status_code == 400
    engines = httpx.get(f"{pipeline.url}/health").json()
    assert engines["status"] == "ok"


def test_a_decode_engine_that_is_killed_loses_no_token(pipeline: Pipeline) -> None:
    """What it had begun goes on at the prefill engine, and it is started again."""
    prompt, expected = prompt_of(40), generate(pipeline.urls["prefill-0"], prompt_of(40), 60)
    body = {"token_ids": prompt, "sampling_params": GREEDY | {"max_tokens": 60}, "stream": True}
    received: list[int] = []
    with httpx.stream("POST", f"{pipeline.url}/inference/v1/generate", json=body, timeout=PATIENCE_S) as answer:
        for line in answer.iter_lines():
            chunk = json.loads(line[6:]) if line.startswith("data: {") else {"choices": []}
            assert "error" not in chunk, chunk
            received += [token for choice in chunk["choices"] for token in choice["token_ids"]]
            if chunk["choices"] and len(received) == 20:
                os.kill(pipeline.pid_of("decode-0"), signal.SIGKILL)
    assert received == expected
    until(lambda: _is_well(pipeline, "decode-0"), 300)
    assert generate(pipeline.url, prompt, 12) == expected[:12]


def test_a_prefill_engine_that_is_killed_is_done_without(pipeline: Pipeline) -> None:
    expected = generate(pipeline.urls["decode-0"], prompt_of(60), 12)
    pid = pipeline.pid_of("prefill-0")
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid), 10)
    assert generate(pipeline.url, prompt_of(60), 12) == expected
    until(lambda: _is_well(pipeline, "prefill-0"), 300)
    time.sleep(3)  # the router's next look
    pulled = holds(pipeline, "pulled")
    assert generate(pipeline.url, prompt_of(60), 12) == expected
    assert holds(pipeline, "pulled") == pulled + 1


def _is_well(pipeline: Pipeline, name: str) -> bool:
    try:
        return httpx.get(f"{pipeline.urls[name]}/health").status_code == 200
    except httpx.TransportError:
        return False
