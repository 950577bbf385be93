from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette

from fakes.asgi import Exchange, get
from fakes.token_server import ScriptedTokenServer
from fakes.toy import EOS, TEMPLATE_TT, THINK, VOCAB_SIZE, write_toy_checkpoint
from fourhop.checkpoint import Checkpoint
from fourhop.frontend.app import create
from fourhop.frontend.config import FrontendConfig
from fourhop.service import ServerConfig
from fourhop.tokens.choices import merge_choices, split_choices, with_seed
from fourhop.tokens.server import TokenServer, collect
from fourhop.wire.errors import ClientError, ErrorBody, PeerError, PeerRefused, PeerTimeout, Unavailable
from fourhop.wire.generate import ChunkChoice, GenerateChunk, GenerateRequest, PromptTokensDetails, Usage
from fourhop.wire.logprobs import ChoiceLogprobs, TokenLogprob, TopLogprob
from fourhop.wire.sse import DONE, SSEDecoder

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT_IDS = [262, *b"user\nhi", 263, 10, 262, *b"assistant\n"]
NUM_PROMPT = len(PROMPT_IDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"))


@dataclass
class Choices:
    """A token server that serves n > 1 as the real ones do: by one scripted request for each choice."""

    script: ScriptedTokenServer

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        requests = split_choices(with_seed(request, lambda: 1))
        async for chunk in merge_choices([self.script.generate(one) for one in requests]):
            yield chunk


def frontend(
    folder: Path, upstream: TokenServer | None, config: FrontendConfig | None = None, **more: Any
) -> Starlette:
    return create(config or FrontendConfig(), Checkpoint("toy", folder), ServerConfig(), upstream, **more)


def script(text: str = "Hello", **fields: Any) -> ScriptedTokenServer:
    """One token a step."""
    return ScriptedTokenServer([[byte] for byte in text.encode()], **fields)


def post(app: Starlette, path: str, body: Any, **headers: str) -> Exchange:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    exchange = Exchange("POST", path, {"content-type": "application/json", **headers}, [raw])
    return asyncio.run(exchange.run(app))


def answer(exchange: Exchange, status: int = 200) -> Any:
    assert exchange.status == status, exchange.content
    return json.loads(exchange.content)


def events(exchange: Exchange) -> list[Any]:
    """The events of a stream that ends, once and last, with `[DONE]`."""
    assert (exchange.status, exchange.complete) == (200, True), exchange.content
    assert exchange.answer_headers["content-type"].startswith("text/event-stream")
    decoder = SSEDecoder()
    *data, last = decoder.feed(exchange.content)
    assert last == DONE and DONE not in data and decoder.close()
    return [json.loads(event) for event in data]


def chat(app: Starlette, **fields: Any) -> Any:
    return answer(post(app, CHAT, {"messages": MESSAGES, **fields}))


def chat_events(app: Starlette, **fields: Any) -> list[Any]:
    return events(post(app, CHAT, {"messages": MESSAGES, "stream": True, **fields}))


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def finishes(chunks: list[Any]) -> list[tuple[int, str]]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]


def test_chat(folder: Path) -> None:
    upstream = script()
    body = chat(frontend(folder, upstream, now_s=lambda: 1000.0), model="toy", max_tokens=5)
    assert (body["object"], body["model"], body["created"]) == ("chat.completion", "toy", 1000)
    assert body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hello",
        "reasoning": None,
        "tool_calls": [],
        "refusal": None,
    }
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("length", None, None)
    assert body["usage"]["prompt_tokens"] == NUM_PROMPT
    assert (body["usage"]["completion_tokens"], body["usage"]["total_tokens"]) == (5, NUM_PROMPT + 5)
    assert upstream.requests[0].token_ids == PROMPT_IDS
    assert upstream.requests[0].sampling_params.max_tokens == 5


def test_a_priority_is_for_who_serves_to_take_or_refuse(folder: Path) -> None:
    upstream = script()
    chat(frontend(folder, upstream), priority=-3)
    assert upstream.requests[0].priority == -3


def test_stream_has_role_deltas_finish_and_done(folder: Path) -> None:
    chunks = chat_events(frontend(folder, script("Héllo")))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * len(chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert text_of(chunks) == "Héllo"
    assert finishes(chunks) == [(0, "length")]
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("trailing_finish", [False, True])
def test_usage_comes_once_after_the_last_finish(folder: Path, trailing_finish: bool) -> None:
    """Case 53."""
    app = frontend(folder, Choices(script(trailing_finish=trailing_finish)))
    chunks = chat_events(app, n=2, stream_options={"include_usage": True})
    *before, last = chunks
    assert all(chunk["usage"] is None for chunk in before)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (NUM_PROMPT, 10)
    assert sorted(finishes(before)) == [(0, "length"), (1, "length")]


def test_choices_are_kept_apart(folder: Path) -> None:
    app = frontend(folder, Choices(script("Hé👋")))
    body = chat(app, n=3)
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [(i, "Hé👋") for i in range(3)]
    chunks = chat_events(app, n=3)
    assert [text_of(chunks, index) for index in range(3)] == ["Hé👋"] * 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_stop_string_ends_the_request_upstream(folder: Path, stream: bool, n: int) -> None:
    upstream = script("one two three", stop_before=9)
    app = frontend(folder, Choices(upstream))
    if stream:
        chunks = chat_events(app, n=n, stop=[" two"], stream_options={"include_usage": True})
        texts, ends = [text_of(chunks, i) for i in range(n)], sorted(finishes(chunks))
        usage = chunks[-1]["usage"]
    else:
        body = chat(app, n=n, stop=[" two"])
        texts = [choice["message"]["content"] for choice in body["choices"]]
        ends = [(choice["index"], choice["finish_reason"]) for choice in body["choices"]]
        usage = body["usage"]
        assert body["choices"][0]["stop_reason"] == " two"
    assert texts == ["one"] * n
    assert ends == [(i, "stop") for i in range(n)]
    assert usage["completion_tokens"] == 7 * n
    assert (upstream.num_open, upstream.num_aborted) == (0, n)
    assert all(request.sampling_params.stop == [] for request in upstream.requests)


def test_a_finished_choice_does_not_end_the_others(folder: Path) -> None:
    """The first choice meets the stop string; the second goes on to its own end."""

    class Two:
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
            for index, byte in ((0, b"a"), (1, b"b"), (0, b"!"), (1, b"c"), (0, b"x"), (1, b"d")):
                yield GenerateChunk(request_id="", choices=[ChunkChoice(index, list(byte))])
            yield GenerateChunk(request_id="", choices=[ChunkChoice(0, [], "length")])
            yield GenerateChunk(request_id="", choices=[ChunkChoice(1, [], "length")])
            yield GenerateChunk(request_id="", choices=[], usage=Usage(1, 6, 7))

    chunks = chat_events(frontend(folder, Two()), n=2, stop="!")
    assert (text_of(chunks, 0), text_of(chunks, 1)) == ("a", "bcd")
    assert finishes(chunks) == [(0, "stop"), (1, "length")]


def test_eos_is_no_text(folder: Path) -> None:
    app = frontend(folder, ScriptedTokenServer([[104], [105, EOS]], finish="stop"))
    body = chat(app, return_token_ids=True)
    assert body["choices"][0]["message"]["content"] == "hi"
    assert body["choices"][0]["token_ids"] == [104, 105, EOS]
    assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("stop", 3)
    assert body["prompt_token_ids"] == PROMPT_IDS
    chunks = chat_events(app, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == PROMPT_IDS
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"] or []] == [104, 105, EOS]


def test_reasoning_is_split_from_content(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path, template=TEMPLATE_TT)
    ids = [[*b"why"], [259], [*b"ok"]]
    app = frontend(folder, ScriptedTokenServer(ids, finish="stop"), FrontendConfig(reasoning_parser="qwen3"))
    body = chat(app, stop_token_ids=[])
    assert body["choices"][0]["message"]["reasoning"] == "why"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    chunks = chat_events(app)
    assert "".join(c["choices"][0]["delta"].get("reasoning") or "" for c in chunks) == "why"
    assert THINK in json.loads(json.dumps(answer(post(app, "/tokenize", {"messages": MESSAGES}))))["tokens"]


def test_cached_tokens_are_passed_on(folder: Path) -> None:
    class Cached:
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
            yield GenerateChunk(request_id="", choices=[ChunkChoice(0, [97], "length")])
            usage = Usage(NUM_PROMPT, 1, NUM_PROMPT + 1, PromptTokensDetails(cached_tokens=16))
            yield GenerateChunk(request_id="", choices=[], usage=usage)

    assert chat(frontend(folder, Cached()))["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_tool_calls(folder: Path) -> None:
    config = FrontendConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")
    app = frontend(folder, ScriptedTokenServer(CALL_IDS, finish="stop"), config)
    choice = chat(app, tools=[TOOL])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"a": 1}'})
    chunks = chat_events(app, tools=[TOOL])
    pieces = [p for chunk in chunks for p in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(piece["function"].get("arguments", "") for piece in pieces) == '{"a": 1}'
    assert [piece["function"]["name"] for piece in pieces if "name" in piece["function"]] == ["f"]
    assert finishes(chunks) == [(0, "tool_calls")]


def test_logprobs(folder: Path) -> None:
    class Likely:
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
            assert request.sampling_params.logprobs == 1
            for byte in b"ab":
                entry = TokenLogprob(byte, -0.5, 1, [TopLogprob(byte, -0.5, 1)])
                yield GenerateChunk(request_id="", choices=[ChunkChoice(0, [byte], logprobs=ChoiceLogprobs([entry]))])
            yield GenerateChunk(request_id="", choices=[ChunkChoice(0, [], "length")])
            yield GenerateChunk(request_id="", choices=[], usage=Usage(1, 2, 3))

    app = frontend(folder, Likely())
    entries = chat(app, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert [(e["token"], e["logprob"], e["bytes"], len(e["top_logprobs"])) for e in entries] == [
        ("a", -0.5, [97], 1),
        ("b", -0.5, [98], 1),
    ]
    chunks = chat_events(app, logprobs=True, top_logprobs=1)
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for logprobs in streamed if logprobs for entry in logprobs["content"]] == entries
    logprobs = complete(app, "x", logprobs=1)["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["text_offset"]) == (["a", "b"], [0, 1])


def complete(app: Starlette, prompt: Any, **fields: Any) -> Any:
    return answer(post(app, COMPLETION, {"prompt": prompt, **fields}))


def test_completion(folder: Path) -> None:
    body = complete(frontend(folder, script(" there")), "hi")
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (" there", "length")
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (2, 6)


@pytest.mark.parametrize("prompt", [["ab", "c"], [[97, 98], [99]]])
def test_prompts_are_numbered_through(folder: Path, prompt: Any) -> None:
    upstream = script("x")
    app = frontend(folder, Choices(upstream))
    body = complete(app, prompt, n=2, return_token_ids=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[97, 98], [97, 98], [99], [99]]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 4)
    fields = {"prompt": prompt, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(post(app, COMPLETION, fields))
    assert sorted(finishes(chunks)) == [(i, "length") for i in range(4)]
    assert chunks[-1]["usage"]["total_tokens"] == 7


def test_echo(folder: Path) -> None:
    """Case 58; `test_echo.py` has the rest."""
    app = frontend(folder, script("!"))
    assert complete(app, "hé", echo=True)["choices"][0]["text"] == "hé!"
    chunks = events(post(app, COMPLETION, {"prompt": "hé", "echo": True, "stream": True}))
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "hé!"


def test_an_error_of_one_prompt_ends_the_others(folder: Path) -> None:
    class Second(ScriptedTokenServer):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
            if request.token_ids == [98]:
                raise PeerError("engine gone")
            async for chunk in super().generate(request):
                yield chunk

    upstream = Second([[97], [97]], stop_before=1)
    assert post(frontend(folder, upstream), COMPLETION, {"prompt": ["a", "b"]}).status == 502
    assert upstream.num_open == 0


REFUSALS = [
    PeerRefused(400, ErrorBody("too long", "BadRequestError", "messages", 400)),
    PeerRefused(429, ErrorBody("busy", "RateLimit", None, 429), retry_after_s=7.0),
    Unavailable("no decode engine is alive", retry_after_s=1.0),
    PeerError("http://127.0.0.1:1: connection refused"),
    PeerTimeout("no answer in 10 s"),
    ClientError("n is too large", param="n"),
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL_IDS = [[260], [*b'{"name": "f", '], [*b'"arguments": {"a": 1}}'], [261]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: str(error.status))
def test_an_error_before_the_first_byte_keeps_its_status(folder: Path, error: Any, stream: bool) -> None:
    exchange = post(
        frontend(folder, script(stop_before=0, error=error)), CHAT, {"messages": MESSAGES, "stream": stream}
    )
    body = answer(exchange, error.status)["error"]
    assert (body["message"], body["param"], body["code"]) == (error.message, error.param, error.status)
    assert ("retry-after" in exchange.answer_headers) == (error.retry_after_s is not None)


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("sampling_params.n", "n"),
        ("sampling_params.logprobs", "top_logprobs"),
        ("sampling_params.max_tokens", "max_completion_tokens"),
        ("token_ids[7]", "messages"),
        ("cache_salt", "cache_salt"),
    ],
)
def test_a_refusal_from_below_names_the_clients_field(folder: Path, path: str, own: str) -> None:
    app = frontend(folder, script(stop_before=0, error=ClientError(f"{path}: is too much", param=path)))
    error = answer(post(app, CHAT, {"messages": MESSAGES, "max_completion_tokens": 1}), 400)["error"]
    assert (error["param"], error["message"]) == (own, f"{own}: is too much")


def test_a_refused_prompt_is_the_completions_prompt(folder: Path) -> None:
    app = frontend(folder, script(stop_before=0, error=ClientError("token_ids: too long", param="token_ids")))
    assert answer(post(app, COMPLETION, {"prompt": "a"}), 400)["error"]["param"] == "prompt"


def test_a_later_error_is_an_event_then_done(folder: Path) -> None:
    chunks = chat_events(frontend(folder, script(stop_before=2, error=PeerError("engine gone"))))
    assert text_of([chunk for chunk in chunks if "choices" in chunk]) == "He"
    assert chunks[-1]["error"]["message"] == "engine gone"
    assert finishes(chunks[:-1]) == []


def test_an_error_is_no_partial_answer(folder: Path) -> None:
    app = frontend(folder, script(stop_before=2, error=PeerError("engine gone")))
    assert answer(post(app, CHAT, {"messages": MESSAGES}), 502)["error"]["message"] == "engine gone"


def test_a_stream_that_just_ends_is_an_error(folder: Path) -> None:
    class Cut:
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
            yield GenerateChunk(request_id="", choices=[ChunkChoice(0, [97])])

    answer(post(frontend(folder, Cut()), CHAT, {"messages": MESSAGES}), 502)


BAD: list[tuple[str, Any, int, str | None]] = [
    (CHAT, b"{", 400, None),
    (CHAT, b"[]", 400, None),
    (CHAT, b'{"messages": [{"role": "user", "content": "x\\ud83dy"}]}', 400, "messages[0].content"),
    (CHAT, b'{"messages": [], "stop": ["a", "\\ude42"]}', 400, "stop[1]"),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [1]}, 400, "messages[0]"),
    (CHAT, {"messages": [{"role": "user", "content": 1}]}, 400, "messages[0].content"),
    (CHAT, {"messages": MESSAGES, "temperature": "hot"}, 400, "temperature"),
    (CHAT, {"messages": MESSAGES, "n": 1.5}, 400, "n"),
    (CHAT, {"messages": MESSAGES, "n": 10**6}, 400, "n"),
    (CHAT, {"messages": MESSAGES, "stop": [1]}, 400, "stop[0]"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"264": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": MESSAGES, "stop_token_ids": [VOCAB_SIZE]}, 400, "stop_token_ids[0]"),
    (CHAT, {"messages": MESSAGES, "stop_token_ids": [True]}, 400, "stop_token_ids[0]"),
    (CHAT, {"messages": MESSAGES, "model": "gpt"}, 404, "model"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 3000}]}, 400, "messages"),
    (CHAT, {"messages": MESSAGES, "kv_transfer_params": {"do_remote_decode": True}}, 400, "kv_transfer_params"),
    (COMPLETION, {"prompt": []}, 400, "prompt"),
    (COMPLETION, {"prompt": ""}, 400, "prompt"),
    (COMPLETION, {"prompt": [-1]}, 400, "prompt[0]"),
    (COMPLETION, {"prompt": [VOCAB_SIZE]}, 400, "prompt[0]"),
    (COMPLETION, {"prompt": [10**18]}, 400, "prompt[0]"),
    (COMPLETION, {"prompt": [[-1]]}, 400, "prompt[0][0]"),
    (COMPLETION, {"prompt": [True]}, 400, "prompt[0]"),
    (COMPLETION, {"prompt": [1.5]}, 400, "prompt[0]"),
    (COMPLETION, {"prompt": None}, 400, "prompt"),
    (COMPLETION, {"prompt": "a", "model": "gpt"}, 404, "model"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
    ("/tokenize", {"prompt": 1}, 400, "prompt"),
    ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"tools": 1}}, 400, "chat_template_kwargs.tools"),
    ("/tokenize", {"prompt": "a", "model": "gpt"}, 404, "model"),
    ("/detokenize", {"tokens": [VOCAB_SIZE]}, 400, "tokens[0]"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    (CHAT + "/render", {"messages": []}, 400, "messages"),
    (COMPLETION + "/render", {"prompt": [[]]}, 400, "prompt[0]"),
    (CHAT + "/derender", {"generate_response": 1}, 400, "generate_response"),
    (COMPLETION + "/derender", {"generate_responses": []}, 400, "generate_responses"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_bad_input_is_answered_and_harms_nothing(
    folder: Path, path: str, body: Any, status: int, param: str | None, stream: bool
) -> None:
    """Cases 16 and 17, and what else clients send."""
    upstream = script()
    app = frontend(folder, upstream)
    if stream and isinstance(body, dict) and path in (CHAT, COMPLETION):
        body = {**body, "stream": True}
    error = answer(post(app, path, body), status)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (status, param)
    assert error["message"] and "Traceback" not in error["message"]
    assert upstream.requests == []
    assert chat(app)["choices"][0]["message"]["content"] == "Hello"


def test_template_refusal_is_a_400_before_any_byte(tmp_path: Path) -> None:
    """Case 4."""
    folder = write_toy_checkpoint(tmp_path, template="{{ raise_exception('only poems') }}")
    exchange = post(frontend(folder, script()), CHAT, {"messages": MESSAGES, "stream": True})
    assert answer(exchange, 400)["error"]["message"] == "only poems"


def test_request_ids(folder: Path) -> None:
    upstream = script()
    app = frontend(folder, upstream)
    exchange = post(app, CHAT, {"messages": MESSAGES, "request_id": "other"}, **{"X-Request-Id": "mine"})
    assert answer(exchange)["id"] == "chatcmpl-mine"
    assert exchange.answer_headers["x-request-id"] == "mine"
    assert chat(app, request_id="a b\n" + "c" * 1000)["id"] == "chatcmpl-ab" + "c" * 126
    assert chat(app)["id"] != chat(app)["id"]
    assert upstream.requests[0].request_id == "chatcmpl-mine"


@dataclass
class VirtualClock:
    at_s: float = 100.0

    def __call__(self) -> float:
        self.at_s += 1.0
        return self.at_s


def ends(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "fourhop.request"]


def test_one_line_says_how_a_request_went(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fourhop.request")
    upstream = script("ab", moments={"received": 0.0, "prefill_done": 0.5})
    exchange = post(
        frontend(folder, upstream, clock=VirtualClock()), CHAT, {"messages": MESSAGES}, **{"X-Request-Id": "me"}
    )
    (line,) = ends(caplog)
    assert line.startswith("chat request_id=me status=200 finish=length prompt_tokens=21 completion_tokens=2 ")
    assert "rendered=1.0000 prefill_done=2.5000" in line
    assert line.split()[-1].startswith("finished=")
    timing = exchange.answer_headers["server-timing"]
    assert timing.startswith("received;dur=0.0, rendered;dur=1000.0, prefill_done;dur=2500.0, first_token;dur=")


def test_stream_has_server_timing_up_to_its_first_token(folder: Path) -> None:
    app = frontend(folder, script(), clock=VirtualClock())
    timing = post(app, CHAT, {"messages": MESSAGES, "stream": True}).answer_headers["server-timing"]
    assert "first_token" in timing and "finished" not in timing


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("upstream", "body", "expected"),
    [
        (script(), {"messages": []}, "status=400 finish=refused"),
        (script(stop_before=0, error=PeerError("x")), {"messages": MESSAGES}, "status=502 finish=failed"),
        (script(stop_before=2, error=PeerError("x")), {"messages": MESSAGES}, "status=502 finish=failed"),
        (None, {"messages": MESSAGES}, "status=503 finish=refused"),
        (script(finish="stop"), {"messages": MESSAGES}, "status=200 finish=stop"),
    ],
)
def test_every_request_ends_once(
    folder: Path, caplog: pytest.LogCaptureFixture, upstream: Any, body: Any, expected: str, stream: bool
) -> None:
    caplog.set_level(logging.INFO, "fourhop.request")
    post(frontend(folder, upstream), CHAT, {**body, "stream": stream})
    (line,) = ends(caplog)
    assert expected in line


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": MESSAGES}), (COMPLETION, {"prompt": ["a", "b"]})])
def test_a_client_that_leaves_ends_the_request_everywhere(
    folder: Path, caplog: pytest.LogCaptureFixture, path: str, prompt: Any, stream: bool
) -> None:
    caplog.set_level(logging.INFO, "fourhop.request")
    upstream = script(stop_before=2)
    app = frontend(folder, upstream)

    async def leave() -> None:
        raw = json.dumps({**prompt, "stream": stream}).encode()
        exchange = Exchange("POST", path, {"content-type": "application/json"}, [raw])
        running = asyncio.create_task(exchange.run(app))
        num_streams = len(prompt.get("prompt", [1]))
        await until(lambda: upstream.num_open == num_streams and (not stream or len(exchange.chunks) > 1))
        exchange.disconnect.set()
        await running

    asyncio.run(leave())
    assert upstream.num_open == 0
    assert "finish=cancelled" in ends(caplog)[0] and len(ends(caplog)) == 1
    upstream.stop_before = None
    assert chat(app)["choices"][0]["message"]["content"] == "Hello"


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  (the fakes have no event to wait for, and nothing here takes time)
            await asyncio.sleep(0)


def test_without_upstream_only_text_is_served(folder: Path) -> None:
    app = frontend(folder, None)
    for path, body in ((CHAT, {"messages": MESSAGES}), (COMPLETION, {"prompt": "a"})):
        assert "--upstream" in answer(post(app, path, body), 503)["error"]["message"]
        assert post(app, path + "/render", body).status == 200
    assert post(app, "/tokenize", {"prompt": "a"}).status == 200
    assert asyncio.run(get("/health").run(app)).status == 200


def test_health_tells_what_is_down(folder: Path) -> None:
    reasons: list[str | None] = ["the decode engine is down", None]

    async def health() -> str | None:
        return reasons.pop(0)

    details = {"degraded": {"no_decode": 5.0}}
    app = frontend(folder, script(), health=health, details=lambda: details)
    down = asyncio.run(get("/health").run(app))
    assert answer(down, 503) == {"status": "unavailable", "reason": "the decode engine is down", **details}
    assert answer(asyncio.run(get("/health").run(app))) == {"status": "ok", **details}


def test_models(folder: Path) -> None:
    app = frontend(folder, None, FrontendConfig(served_model_name=("a", "b"), max_model_len=99), now_s=lambda: 5.0)
    cards = answer(asyncio.run(get("/v1/models").run(app)))["data"]
    assert [(card["id"], card["root"], card["max_model_len"], card["created"]) for card in cards] == [
        ("a", "a", 99, 5),
        ("b", "a", 99, 5),
    ]


def test_tokenize_and_detokenize(folder: Path) -> None:
    app = frontend(folder, None)
    body = answer(post(app, "/tokenize", {"prompt": "h<think>", "return_token_strs": True}))
    assert body == {"count": 2, "max_model_len": 2048, "tokens": [104, THINK], "token_strs": ["h", "<think>"]}
    assert answer(post(app, "/detokenize", {"tokens": [262, 104]})) == {"prompt": "<|im_start|>h"}


def test_render_tokenize_and_chat_agree(tmp_path: Path) -> None:
    """Case 20."""
    upstream = script()
    config = FrontendConfig(default_chat_template_kwargs={"enable_thinking": False})
    app = frontend(write_toy_checkpoint(tmp_path, template=TEMPLATE_TT), upstream, config)
    for more in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
        body = {"messages": MESSAGES, **more}
        ids = answer(post(app, CHAT + "/render", body))["token_ids"]
        assert answer(post(app, "/tokenize", body))["tokens"] == ids
        chat(app, **more)
        assert upstream.requests[-1].token_ids == ids


def test_render_answers(folder: Path) -> None:
    app = frontend(folder, None)
    body = answer(post(app, CHAT + "/render", {"messages": MESSAGES, "stream": True, "max_tokens": 16, "stop": "x"}))
    assert set(msgspec.structs.asdict(msgspec.convert(body, GenerateRequest))) <= set(body) | {"output_token_ids"}
    assert (body["token_ids"], body["stream"], body["output_mode"]) == (PROMPT_IDS, True, "tokens")
    assert (body["sampling_params"]["max_tokens"], body["sampling_params"]["stop"]) == (16, ["x"])
    several = answer(post(app, COMPLETION + "/render", {"prompt": ["a", "b"]}))
    assert [one["token_ids"] for one in several] == [[97], [98]]
    assert isinstance(answer(post(app, COMPLETION + "/render", {"prompt": "a"})), list)


def test_three_hops_equal_one(folder: Path) -> None:
    """Render, generate, derender by hand give what the chat endpoint gives."""
    upstream = script("Hé, stop here", finish="length")
    app = frontend(folder, upstream)
    request = {"messages": MESSAGES, "stop": "stop"}
    rendered = msgspec.convert(answer(post(app, CHAT + "/render", request)), GenerateRequest)
    generated = asyncio.run(collect(upstream.generate(rendered), model="toy", created=0))
    body = {
        "generate_response": msgspec.to_builtins(generated),
        "chat_request": request,
        "prompt_tokens": NUM_PROMPT,
        "prompt_token_ids": rendered.token_ids,
    }
    derendered = answer(post(app, CHAT + "/derender", body))
    direct = chat(app, **request)
    for answer_ in (derendered, direct):
        assert answer_["choices"][0]["message"]["content"] == "Hé, "
        assert answer_["choices"][0]["finish_reason"] == "stop"
    assert derendered["usage"] == direct["usage"]


def test_streamed_three_hops(folder: Path) -> None:
    app = frontend(folder, None)
    request = {"messages": MESSAGES, "stream": True}
    state, text = None, ""
    for ids, finish in (([72, 195], None), ([169], None), ([], "length")):
        chunk = {"request_id": "r", "choices": [{"index": 0, "token_ids": ids, "finish_reason": finish}]}
        body = {
            "stream": True,
            "generate_chunk": chunk,
            "stream_state": state,
            "prompt_token_ids": PROMPT_IDS,
            "chat_request": request,
        }
        derendered = answer(post(app, CHAT + "/derender", body))
        state = derendered["stream_state"]
        text += text_of([derendered["chunk"]])
    assert text == "Hé"


@dataclass
class Splitting:
    """A prefill engine and a decode engine in one: a ticket comes with the finish when a hold was asked for."""

    requests: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        self.requests.append(request)
        holds = bool((request.kv_transfer_params or {}).get("do_remote_decode"))
        ticket = {"do_remote_prefill": True, "remote_host": "127.0.0.1"} if holds else None
        choice = ChunkChoice(0, [97], "length")
        yield GenerateChunk(request_id=request.request_id, choices=[choice], kv_transfer_params=ticket)
        yield GenerateChunk(request_id=request.request_id, choices=[], usage=Usage(1, 1, 2))


@pytest.mark.parametrize("stream", [False, True])
def test_the_guides_two_steps(folder: Path, stream: bool) -> None:
    upstream = Splitting()
    app = frontend(folder, upstream, FrontendConfig(allow_client_kv_transfer=True))
    fields = {"max_tokens": 1, "return_token_ids": True, "kv_transfer_params": {"do_remote_decode": True}}
    if stream:
        chunks = chat_events(app, **fields)
        ticket = next(chunk["kv_transfer_params"] for chunk in chunks if "kv_transfer_params" in chunk)
        ids = chunks[0]["prompt_token_ids"]
    else:
        prefill = chat(app, **fields)
        ticket, ids = prefill["kv_transfer_params"], prefill["prompt_token_ids"]
    assert upstream.requests[0].kv_transfer_params == {"do_remote_decode": True}
    assert ids == PROMPT_IDS
    whole = {**TICKET, **ticket}
    chat_events(app, kv_transfer_params={**whole, "prompt_token_ids": ids})
    assert upstream.requests[1].token_ids == PROMPT_IDS
    assert upstream.requests[1].kv_transfer_params == whole


TICKET = {
    "ticket_id": "t",
    "connector": "shm",
    "epoch": "e",
    "fingerprint": "f",
    "token_hash": "h",
    "expires_at_s": 1e10,
    "remote_engine_id": "p",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "remote_num_tokens": NUM_PROMPT,
    "remote_block_ids": [[0]],
}


def test_health_answers_while_a_long_prompt_is_rendered(folder: Path) -> None:
    """Case 19."""
    app = frontend(folder, None)
    raw = json.dumps({"messages": [{"role": "user", "content": "word " * 400_000}]}).encode()

    async def both() -> tuple[bool, Exchange]:
        exchange = Exchange("POST", CHAT + "/render", {"content-type": "application/json"}, [raw])
        running: Awaitable[Exchange] = asyncio.ensure_future(exchange.run(app))
        await asyncio.sleep(0)
        health = await get("/health").run(app)
        return health.status == 200 and exchange.status == 0, await running

    was_first, rendered = asyncio.run(both())
    assert was_first
    assert answer(rendered, 400)["error"]["param"] == "messages"


def test_metrics(folder: Path) -> None:
    app = frontend(folder, script())
    chat(app)
    post(app, CHAT, {"messages": []})
    text = asyncio.run(get("/metrics").run(app)).content.decode()
    assert 'fourhop:requests_total{finish="length"} 1.0' in text
    assert 'fourhop:requests_total{finish="refused"} 1.0' in text
    assert "fourhop:first_token_seconds_count 1.0" in text
    assert "fourhop:render_waiting 0.0" in text


def test_no_torch_in_this_process() -> None:
    heavy = "{'torch', 'transformers', 'numpy'}"
    code = f"import sys, fourhop.frontend.app; sys.exit(' '.join({heavy} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_chat_template_of_the_operator(folder: Path) -> None:
    app = frontend(folder, None, FrontendConfig(chat_template="{{ messages[0].content }}!"))
    assert answer(post(app, "/tokenize", {"messages": MESSAGES}))["tokens"] == [*b"hi!"]
