"""Whatever a client sends, it is told what is wrong and where, and the next client notices nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from fakes.models import write_tiny_checkpoint
from fakes.toy import VOCAB_SIZE
from flows.pipelines import metric, until, up
from flows.servers import running, url_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAME = "tiny"
WINDOW = 2048
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
GENERATE = "/inference/v1/generate"
TICKET = {"do_remote_prefill": True}
HOLD = {"do_remote_decode": True}

GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0},
    COMPLETION: {"model": NAME, "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0},
    GENERATE: {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "temperature": 0}},
}


@dataclass(frozen=True)
class Bad:
    """A body, or what is changed in the good one; and the `param` and status of the refusal."""

    path: str
    body: bytes | dict[str, Any]
    param: str | None
    status: int = 400

    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(GOOD[self.path] | self.body).encode()


def params(**changes: Any) -> dict[str, Any]:
    return {"sampling_params": GOOD[GENERATE]["sampling_params"] | changes}


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


MALFORMED = [
    Bad(path, body, None)
    for path in (CHAT, COMPLETION, GENERATE)
    for body in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"temperature": NaN}', b"[" * 100_000, b'{"a":' * 50_000)
]

TEXT = [
    Bad(CHAT, b"{}", "messages"),
    Bad(CHAT, {"messages": []}, "messages"),
    Bad(CHAT, {"messages": "hi"}, "messages"),
    Bad(CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
    Bad(CHAT, {"messages": [{"role": "user"}]}, "messages"),
    Bad(CHAT, user(7), "messages[0].content"),
    Bad(CHAT, user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type"),
    Bad(CHAT, b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0].content"),
    Bad(CHAT, user("a" * 5000), "messages"),
    Bad(CHAT, {"model": "gpt-9"}, "model", 404),
    Bad(CHAT, {"n": 0}, "n"),
    Bad(CHAT, {"n": 10**30}, "n"),
    Bad(CHAT, {"n": 1.5}, "n"),
    Bad(CHAT, {"n": True}, "n"),
    Bad(CHAT, {"max_tokens": 0}, "max_tokens"),
    Bad(CHAT, {"max_tokens": -1}, "max_tokens"),
    Bad(CHAT, {"max_tokens": 10**6}, "max_tokens"),
    Bad(CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    Bad(CHAT, {"max_tokens": "4"}, "max_tokens"),
    Bad(CHAT, {"temperature": -1}, "temperature"),
    Bad(CHAT, {"top_p": 0}, "top_p"),
    Bad(CHAT, {"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    Bad(CHAT, {"logit_bias": {"x": 1}}, "logit_bias.x"),
    Bad(CHAT, {"logit_bias": {"-1": 1}}, "logit_bias.-1"),
    Bad(CHAT, {"logit_bias": {"5": 101}}, "logit_bias.5"),
    Bad(CHAT, {"logit_bias": {"5": "much"}}, "logit_bias[...]"),
    Bad(CHAT, {"logit_bias": [1]}, "logit_bias"),
    Bad(CHAT, {"seed": 2**70}, "seed"),
    Bad(CHAT, {"stop": [""]}, "stop[0]"),
    Bad(CHAT, {"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids[0]"),
    Bad(CHAT, {"allowed_token_ids": []}, "allowed_token_ids"),
    Bad(CHAT, {"min_tokens": 9}, "min_tokens"),
    Bad(CHAT, {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    Bad(CHAT, {"stream": "yes"}, "stream"),
    Bad(CHAT, {"stream": True, "n": 10**6}, "n"),
    Bad(CHAT, {"stream": True, "max_tokens": 10**6}, "max_tokens"),
    Bad(CHAT, {"kv_transfer_params": HOLD}, "kv_transfer_params"),
    Bad(COMPLETION, b"{}", "prompt"),
    Bad(COMPLETION, {"prompt": ""}, "prompt"),
    Bad(COMPLETION, {"prompt": []}, "prompt"),
    Bad(COMPLETION, {"prompt": [VOCAB_SIZE]}, "prompt[0]"),
    Bad(COMPLETION, {"prompt": [1, -1]}, "prompt[1]"),
    Bad(COMPLETION, {"prompt": [1.5]}, "prompt[0]"),
    Bad(COMPLETION, {"prompt": [True]}, "prompt[0]"),
    Bad(COMPLETION, {"prompt": [10**30]}, "prompt[0]"),
    Bad(COMPLETION, {"prompt": [[1], [VOCAB_SIZE]]}, "prompt[1][0]"),
    Bad(COMPLETION, {"prompt": [1] * WINDOW}, "prompt"),
    Bad(COMPLETION, {"prompt": [1] * (WINDOW - 3)}, "max_tokens"),
    Bad(COMPLETION, {"stream": True, "prompt": [VOCAB_SIZE]}, "prompt[0]"),
    Bad(COMPLETION, {"n": 300}, "n"),
]

TOKENS = [
    Bad(GENERATE, b"{}", "token_ids"),
    Bad(GENERATE, b'{"token_ids": [1]}', "sampling_params"),
    Bad(GENERATE, {"token_ids": []}, "token_ids"),
    Bad(GENERATE, {"token_ids": "a"}, "token_ids"),
    Bad(GENERATE, {"token_ids": [VOCAB_SIZE]}, "token_ids[0]"),
    Bad(GENERATE, {"token_ids": [1, -1]}, "token_ids[1]"),
    Bad(GENERATE, {"token_ids": [1.0]}, "token_ids[0]"),
    Bad(GENERATE, {"token_ids": [True]}, "token_ids[0]"),
    Bad(GENERATE, {"token_ids": [1] * WINDOW}, "token_ids"),
    Bad(GENERATE, {"stream": True, "token_ids": [VOCAB_SIZE]}, "token_ids[0]"),
    Bad(GENERATE, {"model": "gpt-9"}, "model", 404),
    Bad(GENERATE, params(max_tokens=0), "sampling_params.max_tokens"),
    Bad(GENERATE, params(max_tokens=-1), "sampling_params.max_tokens"),
    Bad(GENERATE, params(max_tokens=WINDOW), "sampling_params.max_tokens"),
    Bad(GENERATE, params(n=0), "sampling_params.n"),
    Bad(GENERATE, params(n=10**6), "sampling_params.n"),
    Bad(GENERATE, params(temperature="hot"), "sampling_params.temperature"),
    Bad(GENERATE, params(stop=["x"]), "sampling_params.stop"),
    Bad(GENERATE, params(logit_bias={"999": 1}), "sampling_params.logit_bias"),
    Bad(GENERATE, {"output_token_ids": [VOCAB_SIZE]}, "output_token_ids[0]"),
    Bad(GENERATE, {"output_token_ids": [1, 2, 3, 4]}, "output_token_ids"),
    Bad(GENERATE, {"kv_transfer_params": [1]}, "kv_transfer_params"),
]

TRANSFERS = [
    Bad(GENERATE, {"kv_transfer_params": {"surprise": 1}}, "kv_transfer_params"),
    Bad(GENERATE, {"kv_transfer_params": TICKET}, "kv_transfer_params.ticket_id"),
    Bad(GENERATE, {"kv_transfer_params": TICKET | {"ticket_id": 7}}, "kv_transfer_params.ticket_id"),
    Bad(GENERATE, {"kv_transfer_params": HOLD | TICKET}, "kv_transfer_params.ticket_id"),
    Bad(GENERATE, {"kv_transfer_params": HOLD} | params(n=2), "sampling_params.n"),
]


def named(cases: list[Bad]) -> Any:
    """Test ids: the path's last word and the case's number."""
    return [
        pytest.param(case, id=f"{case.path.rpartition('/')[2]}-{number}-{case.param}")
        for number, case in enumerate(cases)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


@dataclass(frozen=True)
class Target:
    """A server. `fresh` are its answers to the good requests before anything bad came."""

    url: str
    fresh: dict[str, Any]

    def check(self, bad: Bad, headers: dict[str, str] | None = None) -> None:
        """The bad request is refused as it should be, and then the good one is answered as on a fresh server."""
        headers = headers or {"Content-Type": "application/json"}
        refusal = httpx.post(self.url + bad.path, content=bad.content(), headers=headers, timeout=60)
        assert refusal.status_code == bad.status, refusal.text
        error = refusal.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["param"], error["code"]) == (bad.param, bad.status), error
        assert 0 < len(error["message"]) < 500
        assert answer(self.url, bad.path) == self.fresh[bad.path]


def answer(url: str, path: str) -> Any:
    """What a good request gets, without what differs from time to time."""
    reply = httpx.post(url + path, json=GOOD[path], timeout=60)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    return body["choices"], {name: count for name, count in body["usage"].items() if isinstance(count, int)}


def target(url: str, paths: tuple[str, ...]) -> Target:
    return Target(url, {path: answer(url, path) for path in paths})


@pytest.fixture(scope="module")
def serve(model: str) -> Iterator[Target]:
    flags = ("--served-model-name", NAME, "--num-threads", "1", "--max-body-bytes", "300000")
    with running(("serve", model, "--port", "0", *flags)) as (server,):
        yield target(url_of(server), (CHAT, COMPLETION, GENERATE))


@pytest.fixture(scope="module")
def split(model: str) -> Iterator[tuple[Target, Target]]:
    """`fourhop up`: its front port, and its prefill engine. In the end no engine holds anything."""
    with up(model, "--served-model-name", NAME, "--num-threads", "1") as pipeline:
        yield target(pipeline.url, (CHAT, COMPLETION, GENERATE)), target(pipeline.urls["prefill-0"], (GENERATE,))
        for url in pipeline.urls.values():
            until(lambda url=url: metric(url, "fourhop:held_blocks") == 0, 10)  # type: ignore[misc]


@pytest.mark.parametrize("bad", named(MALFORMED + TEXT + TOKENS))
def test_serve(serve: Target, bad: Bad) -> None:
    serve.check(bad)


@pytest.mark.parametrize("bad", named(MALFORMED + TEXT + TOKENS))
def test_the_front_of_up(split: tuple[Target, Target], bad: Bad) -> None:
    split[0].check(bad)


@pytest.mark.parametrize("bad", named([case for case in MALFORMED + TOKENS + TRANSFERS if case.path == GENERATE]))
def test_an_engine(split: tuple[Target, Target], bad: Bad) -> None:
    split[1].check(bad)


def test_clients_of_up_hand_nothing_over(split: tuple[Target, Target]) -> None:
    split[0].check(Bad(GENERATE, {"kv_transfer_params": HOLD}, "kv_transfer_params"))


def test_a_huge_body(serve: Target) -> None:
    serve.check(Bad(CHAT, user("a" * 300_001), None, 413))


def test_another_type_of_content(serve: Target) -> None:
    serve.check(Bad(CHAT, {}, None), {"Content-Type": "text/plain"})


@pytest.mark.parametrize(("method", "path", "status"), [("GET", CHAT, 405), ("POST", "/v1/nothing", 404)])
def test_paths_and_methods(serve: Target, method: str, path: str, status: int) -> None:
    refusal = httpx.request(method, serve.url + path, timeout=60)
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (status, status)
