"""Engines of `fourhop up` are killed and clients go away: every request ends, and nothing stays held."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from fakes.models import write_tiny_checkpoint
from flows.pipelines import Pipeline, metric, until, up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STREAMS = 20
NUM_TOKENS = 300
SEEDS = (1, 11, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 142, 151, 162, 170, 180, 190)
"""No draw of these streams lies within 2e-5 of the border between two tokens. One that does may fall on either side:
KV that was prefilled differs from KV that was decoded in the last bits."""
NUM_BEFORE = 5
"""Tokens that every stream has when engines are killed."""
NUM_IN_THE_MIDDLE = 15
"""At least so many have not ended by then. The first may have, while the last wait for their prompts' turn."""
LIMIT_S = 10.0
SERVED_LIMIT_S = 90.0
RESTART_LIMIT_S = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def pipeline(model: str) -> Iterator[Pipeline]:
    with up(model, "--num-threads", "1") as pipeline:
        yield pipeline


def body_of(number: int, **changes: Any) -> dict[str, Any]:
    """A request of its own length, whose tokens depend on its prompt, its seed and nothing else."""
    prompt = [(number * 31 + place * 7) % 256 for place in range(10 + 13 * number)]
    sampling = {"temperature": 0.8, "top_k": 4, "seed": SEEDS[number], "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return {"prompt": prompt, "return_token_ids": True, **sampling, **changes}


@dataclass
class Stream:
    """One client of a stream, in a thread of its own. It has ended, well or with `error`, when `run` returns."""

    number: int
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    error: dict[str, Any] | None = None
    ended_s: float = 0.0

    def run(self, url: str, leave_after: int | None = None) -> None:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body_of(self.number, stream=True), timeout=SERVED_LIMIT_S
        ) as answer:
            if answer.status_code != 200:
                self.error = json.loads(answer.read())["error"]
            else:
                self._read(answer, leave_after)
        self.ended_s = time.monotonic()

    def _read(self, answer: httpx.Response, leave_after: int | None) -> None:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                assert self.error or self.finish, "a stream ends with a finish or an error"
                return
            if line:
                self._take(json.loads(line.removeprefix("data: ")))
            if leave_after is not None and len(self.token_ids) >= leave_after:
                return
        raise AssertionError("the stream was cut off")

    def _take(self, event: dict[str, Any]) -> None:
        self.error = event.get("error")
        for choice in event.get("choices", []):
            self.token_ids += choice["token_ids"]
            self.finish = choice["finish_reason"]


@pytest.fixture(scope="module")
def expected(pipeline: Pipeline) -> list[list[int]]:
    """The tokens of every stream when nobody is killed."""
    streams = [Stream(number) for number in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        list(threads.map(lambda stream: stream.run(pipeline.url), streams))
    assert [(stream.error, stream.finish) for stream in streams] == [(None, "length")] * NUM_STREAMS
    assert {len(stream.token_ids) for stream in streams} == {NUM_TOKENS}
    return [stream.token_ids for stream in streams]


def kill_under_load(pipeline: Pipeline, *engines: str) -> list[Stream]:
    """Streams that have ended, most in the middle when the engines were killed; errors come within the limit."""
    streams = [Stream(number) for number in range(NUM_STREAMS)]
    pids = [pipeline.pid_of(engine) for engine in engines]
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        running = [threads.submit(stream.run, pipeline.url) for stream in streams]
        until(lambda: all(len(stream.token_ids) >= NUM_BEFORE for stream in streams), SERVED_LIMIT_S)
        assert sum(stream.finish is None for stream in streams) >= NUM_IN_THE_MIDDLE
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        for future in running:
            future.result(SERVED_LIMIT_S)
    late = [stream.ended_s - killed_s for stream in streams if stream.error and stream.ended_s - killed_s > LIMIT_S]
    assert not late
    return streams


def ask(pipeline: Pipeline, number: int = 0) -> httpx.Response:
    return httpx.post(f"{pipeline.url}/v1/completions", json=body_of(number, max_tokens=4), timeout=LIMIT_S)


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


def recover(pipeline: Pipeline, expected: list[list[int]]) -> None:
    """Every engine is back, requests are split again, no block is in use and no ticket is open."""
    until(lambda: all(is_idle(url) for url in pipeline.urls.values()), RESTART_LIMIT_S)
    until(lambda: httpx.get(f"{pipeline.url}/health", timeout=60).status_code == 200, LIMIT_S)
    before = metric(pipeline.urls["decode-0"], "fourhop:kv_transfers_total")

    def is_split() -> bool:
        assert tokens_of(ask(pipeline)) == expected[0][:4]
        return metric(pipeline.urls["decode-0"], "fourhop:kv_transfers_total") > before

    until(is_split, LIMIT_S)
    until(lambda: all(is_idle(url) for url in pipeline.urls.values()), LIMIT_S)
    until(lambda: metric(pipeline.url, "fourhop_router_owed_holds") == 0, LIMIT_S)


def is_idle(url: str) -> bool:
    """The engine answers, computes nothing, and all of its blocks are free."""
    try:
        info = httpx.get(f"{url}/worker", timeout=60).raise_for_status().json()
    except httpx.HTTPError:
        return False
    busy = {name: count for name, count in info.items() if name in ("num_held_blocks", "num_running", "num_waiting")}
    return info["num_free_blocks"] == info["num_blocks"] and busy == dict.fromkeys(busy, 0)


@pytest.mark.parametrize(("killed", "left"), [("prefill-0", "decode-0"), ("decode-0", "prefill-0")])
def test_the_engine_that_is_left_serves(pipeline: Pipeline, expected: list[list[int]], killed: str, left: str) -> None:
    streams = kill_under_load(pipeline, killed)
    assert [stream.error for stream in streams] == [None] * NUM_STREAMS
    assert [stream.token_ids for stream in streams] == expected
    assert tokens_of(ask(pipeline, 1)) == expected[1][:4]
    recover(pipeline, expected)


def test_with_no_engine_left_requests_are_told_so(pipeline: Pipeline, expected: list[list[int]]) -> None:
    streams = kill_under_load(pipeline, "prefill-0", "decode-0")
    broken = [stream for stream in streams if stream.finish is None]
    assert len(broken) >= NUM_IN_THE_MIDDLE
    for stream in broken:
        assert stream.error is not None and stream.error["code"] in (502, 503), stream.error
        assert stream.token_ids == expected[stream.number][: len(stream.token_ids)]
    assert all(stream.token_ids == expected[stream.number] for stream in streams if stream.finish is not None)
    refusal = ask(pipeline)
    assert refusal.status_code == 503
    assert int(refusal.headers["Retry-After"]) >= 1
    message = refusal.json()["error"]["message"]
    assert all(url in message for url in pipeline.urls.values()), message
    assert httpx.get(f"{pipeline.url}/health", timeout=60).status_code == 503
    recover(pipeline, expected)


def test_clients_that_go_away(pipeline: Pipeline, expected: list[list[int]]) -> None:
    """At the first token, while the hand-over goes on, and later."""
    streams = [Stream(number) for number in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        for stream in streams:
            threads.submit(stream.run, pipeline.url, leave_after=stream.number % 5 + 1)
    assert all(stream.finish is None and stream.error is None for stream in streams)
    recover(pipeline, expected)
    until(lambda: len(pipeline.server.wait_for("outcome=cancelled")) >= NUM_STREAMS, LIMIT_S)
