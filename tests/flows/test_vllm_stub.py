"""`fourhop frontend` in front of a server that speaks `/inference/v1/generate` as a stock vLLM does.

It tells no moments and knows no `/worker`, sends several tokens at once, nulls and fields of its own, and answers 400
in pydantic's words.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from fakes.toy import EOS, write_toy_checkpoint
from flows.servers import running, url_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ANSWER = "Zürich, I think 👋. It is on a lake."
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Where are you?"}]
NUM_AT_ONCE = 3
"""Tokens of one chunk: they cut characters of several bytes apart."""

KNOWN = {"request_id", "token_ids", "sampling_params", "model", "stream", "stream_options", "return_token_ids"}
KNOWN |= {"output_mode", "cache_salt", "priority", "kv_transfer_params", "ec_transfer_params", "token_offsets"}
KNOWN |= {"features", "content_parts", "reasoning_ended", "reasoning_parser_kwargs"}
"""The fields of vLLM 0.32's request."""


@dataclass
class VLLM:
    """What the stub was asked; `refusal` is its answer if it is set."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    refusal: dict[str, Any] | None = None


def events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A stream as vLLM 0.32 writes it; the choices take turns."""
    head = {"request_id": f"generate-tokens-{body['request_id']}", "output_mode": "tokens"}
    ids = [*ANSWER.encode(), EOS]
    num_choices = body["sampling_params"].get("n", 1)
    for start in range(0, len(ids), NUM_AT_ONCE):
        is_last = start + NUM_AT_ONCE >= len(ids)
        for index in range(num_choices):
            choice = {
                "index": index,
                "finish_reason": "stop" if is_last else None,
                "stop_reason": None,
                "token_ids": ids[start : start + NUM_AT_ONCE],
                "routed_experts": None,
                "weight_versions": None,
                "logprobs": None,
            }
            yield {**head, "usage": None, "choices": [choice]}
    if (body.get("stream_options") or {}).get("include_usage"):
        num_prompt, num_output = len(body["token_ids"]), num_choices * len(ids)
        usage = {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_output, "completion_tokens": num_output}
        yield {**head, "usage": usage, "choices": []}


@pytest.fixture(scope="module")
def vllm() -> Iterator[VLLM]:
    """The stub, listening."""
    state = VLLM()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(200 if self.path == "/health" else 404, b"")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/inference/v1/generate"
            assert body["stream"] is True
            state.bodies.append(body)
            if state.refusal is not None:
                self._answer(400, json.dumps(state.refusal).encode())
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in events(body):
                self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        def _answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A frontend that has enough of a stream hangs up."""

    with Quiet(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield state
        server.shutdown()


@pytest.fixture(scope="module")
def url(vllm: VLLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = write_toy_checkpoint(tmp_path_factory.mktemp("toy"))
    command = ("frontend", str(folder), "--port", "0", "--served-model-name", "toy", "--upstream", vllm.url)
    with running(command) as (server,):
        yield url_of(server)


@pytest.fixture
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_a_whole_answer(vllm: VLLM, client: OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=MESSAGES, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert answer.usage is not None
    num_prompt = len(vllm.bodies[-1]["token_ids"])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, len(ANSWER.encode()) + 1)


def test_a_stream(client: OpenAI) -> None:
    *chunks, last = client.chat.completions.create(
        model="toy", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == ANSWER
    assert not [piece for piece in pieces if "\ufffd" in piece], "no half characters"
    assert last.usage is not None and last.usage.completion_tokens == len(ANSWER.encode()) + 1


def test_two_choices(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=MESSAGES, n=2)
    assert [choice.message.content for choice in answer.choices] == [ANSWER, ANSWER]
    assert answer.usage is not None and answer.usage.completion_tokens == 2 * (len(ANSWER.encode()) + 1)


def test_a_stop_string(vllm: VLLM, client: OpenAI) -> None:
    """The frontend finds it; a server of tokens is not told of it."""
    answer = client.completions.create(model="toy", prompt="Where?", stop=["on a"])
    assert answer.choices[0].text == ANSWER.partition("on a")[0]
    assert answer.choices[0].finish_reason == "stop"
    assert not vllm.bodies[-1]["sampling_params"].get("stop")


def test_nothing_is_asked_that_a_stock_vllm_would_ignore(vllm: VLLM, client: OpenAI) -> None:
    client.chat.completions.create(model="toy", messages=MESSAGES, seed=7, max_tokens=5)
    body = vllm.bodies[-1]
    assert body["sampling_params"]["seed"] == 7
    assert body["sampling_params"]["max_tokens"] == 5
    own = {name: value for name, value in body.items() if name not in KNOWN}
    assert not any(own.values()), f"vLLM would ignore {own}"


def test_a_refusal_keeps_its_status_and_its_words(vllm: VLLM, client: OpenAI) -> None:
    error = {"message": "1 validation error(s): n", "type": "Bad Request", "param": "body.n", "code": 400}
    vllm.refusal = {"error": error}
    try:
        with pytest.raises(BadRequestError, match="1 validation error"):
            client.chat.completions.create(model="toy", messages=MESSAGES)
    finally:
        vllm.refusal = None
    assert client.chat.completions.create(model="toy", messages=MESSAGES).choices[0].message.content == ANSWER


def test_the_frontend_is_well_when_vllm_is(url: str) -> None:
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
