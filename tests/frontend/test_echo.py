"""Case 58: a prompt that is echoed, with and without log-probabilities, streamed and not, for every chunking."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette

from fakes.asgi import Exchange
from fakes.toy import BOS, EOS, VOCAB_SIZE, write_toy_checkpoint
from fourhop.checkpoint import Checkpoint
from fourhop.frontend import echo, generation
from fourhop.frontend.app import create
from fourhop.frontend.config import FrontendConfig
from fourhop.service import ServerConfig
from fourhop.tokens.choices import merge_choices, split_choices, with_seed
from fourhop.tokens.limits import Limits, check_request
from fourhop.wire.generate import ChunkChoice, FinishReason, GenerateChunk, GenerateRequest, GenerateResponse, Usage
from fourhop.wire.logprobs import ChoiceLogprobs, PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob
from fourhop.wire.sse import DONE, SSEDecoder

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
LIMITS = Limits(vocab_size=VOCAB_SIZE, max_model_len=2048, max_num_choices=8, max_logprobs=20)
OTHER = ord("z")
"""The likeliest token everywhere."""


def tell(token_id: int, num_top: int) -> TokenLogprob:
    """What the model says of any token wherever it stands: the second likeliest."""
    tops = [TopLogprob(OTHER, -0.125, 1), TopLogprob(token_id, -token_id / 4, 2)][:num_top]
    return TokenLogprob(token_id, -token_id / 4, 2, tops)


def tell_prompt(token_ids: list[int], num_top: int) -> PromptLogprobs:
    entries = [tell(token_id, num_top) for token_id in token_ids[1:]]
    return [
        None,
        *(
            {entry.token_id: PromptLogprob(entry.logprob, entry.rank)}
            | {top.token_id: PromptLogprob(top.logprob, top.rank) for top in entry.top_logprobs}
            for entry in entries
        ),
    ]


@dataclass
class TellingServer:
    """Answers with `steps`, cut at `max_tokens`, and tells what was asked of them and of the prompt."""

    steps: list[list[int]]
    finish: FinishReason = "length"
    requests: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        self.requests.append(request)
        check_request(request, LIMITS)
        streams = [self._one(one) for one in split_choices(with_seed(request, lambda: 1))]
        prompt_first = request.sampling_params.prompt_logprobs is not None
        async for chunk in merge_choices(streams, prompt_first=prompt_first):
            yield chunk

    async def _one(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        params, left = request.sampling_params, request.sampling_params.max_tokens or 0
        told = None if params.prompt_logprobs is None else tell_prompt(request.token_ids, params.prompt_logprobs)
        num_tokens = 0
        for step in self.steps:
            ids = step[: left - num_tokens]
            num_tokens += len(ids)
            entries = None if params.logprobs is None else [tell(token_id, params.logprobs) for token_id in ids]
            await asyncio.sleep(0)
            yield GenerateChunk(
                request_id=request.request_id,
                choices=[ChunkChoice(0, ids, logprobs=None if entries is None else ChoiceLogprobs(entries))],
                prompt_logprobs=told,
            )
            told = None
        yield GenerateChunk(request_id=request.request_id, choices=[ChunkChoice(0, [], self.finish)])
        num_prompt = len(request.token_ids)
        usage = Usage(num_prompt, num_tokens, num_prompt + num_tokens)
        yield GenerateChunk(request_id=request.request_id, choices=[], usage=usage)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"), add_bos=False)


def frontend(folder: Path, server: TellingServer) -> Starlette:
    return create(FrontendConfig(), Checkpoint("toy", folder), ServerConfig(), server)


def post(app: Starlette, path: str, body: Any, status: int = 200) -> bytes:
    exchange = Exchange("POST", path, {"content-type": "application/json"}, [msgspec.json.encode(body)])
    asyncio.run(exchange.run(app))
    assert exchange.status == status, exchange.content
    return exchange.content


def whole(app: Starlette, **body: Any) -> Any:
    return json.loads(post(app, COMPLETION, body))


def streamed(app: Starlette, path: str = COMPLETION, **body: Any) -> list[Any]:
    decoder = SSEDecoder()
    *data, last = decoder.feed(post(app, path, body | {"stream": True}))
    assert last == DONE and decoder.close()
    return [json.loads(event) for event in data]


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """A choice of a stream, put together as a client does."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    logprobs = {name: [value for part in parts for value in part[name]] for name in parts[0]} if parts else None
    (finish,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
    return {"text": "".join(choice["text"] for choice in choices), "logprobs": logprobs, "finish_reason": finish}


def groupings(ids: list[int]) -> list[list[list[int]]]:
    """F2 for a short output: one by one, all at once, and cut in two everywhere."""
    cuts = [[ids[:at], ids[at:]] for at in range(1, len(ids))]
    return [[[token_id] for token_id in ids], [ids], *cuts]


@pytest.mark.parametrize("prompt", ["ab", [*b"ab"]])
@pytest.mark.parametrize("steps", groupings([*b"cd"]))
def test_case_58(folder: Path, prompt: Any, steps: list[list[int]]) -> None:
    app = frontend(folder, TellingServer(steps))
    fields: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 1}
    body = whole(app, **fields)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abcd", "length")
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2, 3],
        "token_logprobs": [None, -24.5, -24.75, -25.0],
        "tokens": ["a", "b", "c", "d"],
        "top_logprobs": [None, *({"z": -0.125, text: -ord(text) / 4} for text in "bcd")],
    }
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (2, 2)
    assert joined(streamed(app, **fields)) == {name: choice[name] for name in ("text", "logprobs", "finish_reason")}


@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_case_58_with_limit_0_there_is_the_prompt_and_nothing_else(folder: Path, logprobs: int | None) -> None:
    server = TellingServer([[EOS]], finish="stop")
    app = frontend(folder, server)
    fields: dict[str, Any] = {"prompt": "ab", "echo": True, "logprobs": logprobs, "max_tokens": 0}
    body = whole(app, **fields, return_token_ids=True)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("ab", "length", [])
    assert body["usage"]["completion_tokens"] == 0 and body["usage"]["total_tokens"] == 2
    expected = None if logprobs is None else [None, -24.5]
    assert (choice["logprobs"] and choice["logprobs"]["token_logprobs"]) == expected
    chunks = streamed(app, **fields, stream_options={"include_usage": True})
    assert joined(chunks) == {name: choice[name] for name in ("text", "logprobs", "finish_reason")}
    assert chunks[-1]["usage"]["completion_tokens"] == 0
    assert [request.sampling_params.max_tokens for request in server.requests] == [1, 1]


def test_case_58_without_a_limit_16_tokens_follow(folder: Path) -> None:
    choice = whole(frontend(folder, TellingServer([[*b"c" * 40]])), prompt="ab", echo=True, logprobs=0)["choices"][0]
    assert choice["text"] == "ab" + "c" * 16
    assert choice["logprobs"]["text_offset"] == list(range(18))
    assert choice["logprobs"]["top_logprobs"][1] == {"b": -24.5}


@pytest.mark.parametrize("steps", groupings([159, 145, 139, *b"d"]))
def test_a_character_over_the_edge_is_whole(folder: Path, steps: list[list[int]]) -> None:
    """Case 22 with echo: the prompt's bytes and the answer's are one text, and nothing is printed twice."""
    app = frontend(folder, TellingServer(steps))
    fields: dict[str, Any] = {"prompt": [*b"Hi ", 240], "echo": True, "logprobs": 0}
    choice = whole(app, **fields)["choices"][0]
    assert choice["text"] == "Hi 👋d"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 3, 3, 3, 4]
    assert joined(streamed(app, **fields)) == {name: choice[name] for name in ("text", "logprobs", "finish_reason")}
    alone = whole(app, **fields, max_tokens=0)["choices"][0]
    assert alone["text"] == "Hi \ufffd"


def test_special_tokens_count_and_are_text_only_on_request(folder: Path) -> None:
    app = frontend(folder, TellingServer([[*b"c"]]))
    fields: dict[str, Any] = {"prompt": [BOS, *b"ab"], "echo": True, "logprobs": 0}
    hidden = whole(app, **fields)["choices"][0]
    assert (hidden["text"], hidden["logprobs"]["text_offset"]) == ("abc", [0, 0, 1, 2])
    assert hidden["logprobs"]["tokens"] == ["<s>", "a", "b", "c"]
    shown = whole(app, **fields, skip_special_tokens=False)["choices"][0]
    assert (shown["text"], shown["logprobs"]["text_offset"]) == ("<s>abc", [0, 3, 4, 5])


def test_stop_strings_are_not_looked_for_in_the_prompt(folder: Path) -> None:
    app = frontend(folder, TellingServer([[*b"xb"], [*b"abc"]]))
    fields: dict[str, Any] = {"prompt": "ab", "echo": True, "logprobs": 0, "stop": ["ab", "bx"]}
    choice = whole(app, **fields)["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("abxb", "ab")
    assert len(choice["logprobs"]["tokens"]) == 2 + 4
    assert joined(streamed(app, **fields))["text"] == "abxb"


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_every_choice_of_every_prompt_has_its_own_prompt(folder: Path, max_tokens: int) -> None:
    server = TellingServer([[*b"x"], [*b"y"], [*b"z"]])
    app = frontend(folder, server)
    fields: dict[str, Any] = {
        "prompt": ["ab", "q"],
        "n": 2,
        "echo": True,
        "logprobs": 1,
        "prompt_logprobs": 0,
        "max_tokens": max_tokens,
    }
    body = whole(app, **fields)
    tail = "xyz"[:max_tokens]
    assert [choice["text"] for choice in body["choices"]] == ["ab" + tail] * 2 + ["q" + tail] * 2
    assert [len(choice["prompt_logprobs"]) for choice in body["choices"]] == [2, 2, 1, 1]
    chunks = streamed(app, **fields)
    for index, choice in enumerate(body["choices"]):
        assert joined(chunks, index) == {name: choice[name] for name in ("text", "logprobs", "finish_reason")}
        first = next(each for chunk in chunks for each in chunk["choices"] if each["index"] == index)
        assert first["prompt_logprobs"] == choice["prompt_logprobs"]
    assert {request.sampling_params.prompt_logprobs for request in server.requests} == {1}


def test_an_echo_without_logprobs_asks_nothing_of_the_prompt(folder: Path) -> None:
    server = TellingServer([[*b"c"]])
    choice = whole(frontend(folder, server), prompt="ab", echo=True)["choices"][0]
    assert (choice["text"], choice["logprobs"], choice["prompt_logprobs"]) == ("abc", None, None)
    assert server.requests[0].sampling_params.prompt_logprobs is None


PROMPT_LOGPROBS = [
    None,
    {
        "98": {"logprob": -24.5, "rank": 2, "decoded_token": "b"},
        "122": {"logprob": -0.125, "rank": 1, "decoded_token": "z"},
    },
]


def test_prompt_logprobs_of_a_completion_are_vllms(folder: Path) -> None:
    app = frontend(folder, TellingServer([[*b"c"], [*b"d"]]))
    fields: dict[str, Any] = {"prompt": "ab", "prompt_logprobs": 1}
    choice = whole(app, **fields)["choices"][0]
    assert (choice["text"], choice["logprobs"], choice["prompt_logprobs"]) == ("cd", None, PROMPT_LOGPROBS)
    told = [each.get("prompt_logprobs") for chunk in streamed(app, **fields) for each in chunk["choices"]]
    assert told == [PROMPT_LOGPROBS] + [None] * (len(told) - 1)


def test_prompt_logprobs_of_a_chat_are_beside_its_choices(folder: Path) -> None:
    app = frontend(folder, TellingServer([[*b"c"]]))
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 1, "n": 2}
    body = json.loads(post(app, CHAT, fields))
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert body["prompt_logprobs"][0] is None
    assert body["prompt_logprobs"][1]["117"]["decoded_token"] == "u"
    chunks = streamed(app, CHAT, **fields)
    assert chunks[0]["prompt_logprobs"] == body["prompt_logprobs"]
    assert all("prompt_logprobs" not in chunk for chunk in chunks[1:])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETION, {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETION, {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETION, {"prompt": "a", "prompt_logprobs": "2"}, "prompt_logprobs"),
        (COMPLETION, {"prompt": "a", "echo": True, "logprobs": 21}, "logprobs"),
        (COMPLETION, {"prompt": "a", "echo": True, "max_tokens": -1}, "max_tokens"),
        (COMPLETION, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_what_is_out_of_range_is_refused_by_path(folder: Path, path: str, fields: dict[str, Any], param: str) -> None:
    app = frontend(folder, TellingServer([[*b"c"]]))
    for stream in (False, True):
        error = json.loads(post(app, path, fields | {"stream": stream}, status=400))["error"]
        assert error["param"] == param and error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_told_of_a_prompt_is_read_beside_the_event_loop(
    folder: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt with many alternatives takes a while: nobody else waits for it (case 19)."""
    threads: list[threading.Thread] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            threads.append(threading.current_thread())
            return function(*args)

        return noted

    for module, name in ((generation, "prompt_texts"), (echo, "prompt_as_completion")):
        monkeypatch.setattr(module, name, noting(getattr(module, name)))
    app = frontend(folder, TellingServer([[*b"c"], [*b"d"]]))
    post(app, COMPLETION, {"prompt": "ab", "echo": True, "logprobs": 1, "n": 2, "stream": stream})
    assert len(threads) == 3 and threading.main_thread() not in threads


# Case 52: through derender


async def generated(app: Starlette, server: TellingServer, request: GenerateRequest) -> list[GenerateChunk]:
    return [chunk async for chunk in server.generate(request)]


def derendered(app: Starlette, server: TellingServer, fields: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """The guide's three hops: render, generate, derender."""
    (rendered,) = json.loads(post(app, f"{COMPLETION}/render", fields))
    request = msgspec.json.decode(msgspec.json.encode(rendered), type=GenerateRequest)
    chunks = asyncio.run(generated(app, server, request))
    shared = {"completion_request": fields}
    if not stream:
        ids = [token_id for chunk in chunks for choice in chunk.choices for token_id in choice.token_ids]
        entries = [e for chunk in chunks for c in chunk.choices for e in (c.logprobs.content if c.logprobs else [])]
        response = {
            "request_id": "r",
            "model": None,
            "created": 0,
            "choices": [
                {
                    "index": 0,
                    "token_ids": ids,
                    "finish_reason": server.finish,
                    "logprobs": {"content": entries} if entries else None,
                }
            ],
            "prompt_logprobs": chunks[0].prompt_logprobs,
        }
        body = shared | {"generate_responses": [response], "prompt_token_ids": [request.token_ids]}
        return dict(json.loads(post(app, f"{COMPLETION}/derender", body))["choices"][0])
    state, answers = None, []
    for chunk in chunks:
        prompt = request.token_ids if state is None else None
        body = shared | {"stream": True, "generate_chunk": chunk, "stream_state": state, "prompt_token_ids": prompt}
        answer = json.loads(post(app, f"{COMPLETION}/derender", body))
        state = answer["stream_state"]
        answers.append(answer["chunk"])
    return joined(answers)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 16])
def test_case_52_derender_echoes_as_the_server_does(folder: Path, max_tokens: int, stream: bool) -> None:
    server = TellingServer([[*b"c"], [*b"d"]])
    app = frontend(folder, server)
    fields: dict[str, Any] = {"prompt": [*b"ab"], "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    expected = whole(app, **fields)["choices"][0]
    answer = derendered(app, server, fields, stream=stream)
    assert {name: answer[name] for name in ("text", "logprobs", "finish_reason")} == {
        name: expected[name] for name in ("text", "logprobs", "finish_reason")
    }


RESPONSE = GenerateResponse(request_id="r", model=None, created=0, choices=[])


@pytest.mark.parametrize(
    ("told", "prompt", "param"),
    [
        (None, [97, 98], "generate_responses[0].prompt_logprobs"),
        ([None], [97, 98], "generate_responses[0].prompt_logprobs"),
        ([None, {"99": {"logprob": -1.0}}], [97, 98], "generate_responses[0].prompt_logprobs[1]"),
        ([None, {"-1": {"logprob": -1.0}}], [97, 98], "generate_responses[0].prompt_logprobs[1]"),
        ([None, {"264": {"logprob": -1.0}}], [97, 98], "generate_responses[0].prompt_logprobs[1]"),
        ([None, {"98": {"logprob": -1.0}}], None, "prompt_token_ids"),
    ],
)
def test_derender_refuses_what_is_not_of_the_prompt(folder: Path, told: Any, prompt: Any, param: str) -> None:
    app = frontend(folder, TellingServer([[*b"c"]]))
    choice = {"index": 0, "token_ids": [99], "finish_reason": "length", "logprobs": {"content": [tell(99, 0)]}}
    response = msgspec.to_builtins(RESPONSE) | {"choices": [choice], "prompt_logprobs": told}
    body = {
        "completion_request": {"prompt": "", "echo": True, "logprobs": 0},
        "generate_responses": [response],
        "prompt_token_ids": None if prompt is None else [prompt],
    }
    assert json.loads(post(app, f"{COMPLETION}/derender", body, status=400))["error"]["param"] == param


def test_offsets_are_where_the_tokens_stand_in_the_text(folder: Path) -> None:
    """For any text: each token's offset is the length of the text before it, characters counted when they are whole."""
    text, more = "añ中 👋b", "ü!"
    app = frontend(folder, TellingServer([[*more.encode()]]))
    choice = whole(app, prompt=text, echo=True, logprobs=0)["choices"][0]
    assert choice["text"] == text + more
    ends = accumulate(len(character.encode()) for character in text + more)
    expected, num_whole, position = [], 0, 0
    for end in ends:
        expected += [num_whole] * (end - position)
        position, num_whole = end, num_whole + 1
    assert choice["logprobs"]["text_offset"] == expected
