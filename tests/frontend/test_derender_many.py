"""Derender for other orchestrators: many streams in one call, and a whole stream in the body."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.types import Message

from fakes.asgi import Exchange, post
from fakes.derendering import TOOLS, chunked, encode
from fakes.toy import EOS, TEMPLATE_TT, VOCAB_SIZE, write_toy_checkpoint
from fourhop.checkpoint import Checkpoint
from fourhop.frontend.app import create
from fourhop.frontend.config import FrontendConfig
from fourhop.service import ServerConfig
from fourhop.wire.generate import GenerateChunk, Usage
from fourhop.wire.sse import DONE, DONE_EVENT, SSEDecoder, encode_event

CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
TEXT = 'why</think>So: é<tool_call>{"name": "f", "arguments": {"n": 7}}</tool_call>'
IDS = [*encode(TEXT), EOS]
BATCH, STREAM, ONE = (f"/v1/chat/completions/derender{end}" for end in ("/batch", "/stream", ""))


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Starlette:
    folder = write_toy_checkpoint(tmp_path_factory.mktemp("toy"), template=TEMPLATE_TT)
    config = FrontendConfig(reasoning_parser="qwen3", tool_call_parser="hermes", enable_auto_tool_choice=True)
    return create(config, Checkpoint("toy", folder), ServerConfig(max_body_bytes=100_000))


def send(app: Starlette, path: str, body: Any, status: int = 200) -> Any:
    exchange = asyncio.run(post(path, msgspec.json.encode(body)).run(app))
    assert exchange.status == status, exchange.content
    return json.loads(exchange.content)


def chunks(sizes: list[int], request_id: str = "r") -> list[GenerateChunk]:
    pieces, start = [], 0
    for size in [*sizes, len(IDS)]:
        pieces.append(IDS[start : start + size])
        start += size
    choices = chunked([piece for piece in pieces if piece], "stop")
    return [GenerateChunk(request_id=request_id, choices=[choice]) for choice in choices]


def entry(generated: list[GenerateChunk], state: Any = None, prompt: Any = None) -> dict[str, Any]:
    return {"generate_chunks": generated, "stream_state": state, "prompt_token_ids": prompt, "chat_request": CHAT}


def prompt_ids(app: Starlette) -> list[int]:
    ids: list[int] = send(app, "/tokenize", {**CHAT, "tools": None})["tokens"]
    return ids


def without_time(chunk: dict[str, Any]) -> dict[str, Any]:
    return {**chunk, "created": 0}


def test_a_batch_is_its_chunks_one_by_one(app: Starlette) -> None:
    prompt = prompt_ids(app)
    streams = [chunks([1] * (len(IDS) - 1), "a"), chunks([7, 9], "b"), chunks([], "c")]
    batch = send(app, BATCH, {"streams": [entry(stream, prompt=prompt) for stream in streams]})
    for stream, progress in zip(streams, batch["streams"], strict=True):
        assert progress["error"] is None
        state, singles = None, []
        for chunk in stream:
            body = {"stream": True, "generate_chunk": chunk, "stream_state": state, "chat_request": CHAT}
            answer = send(app, ONE, {**body, "prompt_token_ids": prompt})
            singles.append(without_time(answer["chunk"]))
            state = answer["stream_state"]
        assert [without_time(chunk) for chunk in progress["chunks"]] == singles
        assert progress["stream_state"] == state


def test_a_batch_goes_on_from_its_states(app: Starlette) -> None:
    whole = chunks([9, 20])
    first = send(app, BATCH, {"streams": [entry(whole[:1], prompt=prompt_ids(app))]})["streams"][0]
    later = send(app, BATCH, {"streams": [entry(whole[1:], first["stream_state"])]})["streams"][0]
    at_once = send(app, BATCH, {"streams": [entry(whole, prompt=prompt_ids(app))]})["streams"][0]
    assert [without_time(c) for c in first["chunks"] + later["chunks"]] == [without_time(c) for c in at_once["chunks"]]


def test_an_error_of_one_stream_is_told_in_its_entry(app: Starlette) -> None:
    prompt, good = prompt_ids(app), chunks([5])
    bad = msgspec.to_builtins(chunks([5]))
    bad[1]["choices"][0]["token_ids"] = [VOCAB_SIZE]
    streams = [entry(good, prompt=prompt), entry(bad, prompt=prompt), entry(good, {"version": 0}), entry(good)]
    answers = send(app, BATCH, {"streams": streams})["streams"]
    assert [len(answer["chunks"]) for answer in answers] == [2, 1, 0, 0]
    assert [answer["error"] and answer["error"]["param"] for answer in answers] == [
        None,
        "streams[1].generate_chunks[1].choices[0].token_ids",
        "streams[2].stream_state",
        "streams[3].prompt_token_ids",
    ]


def body_of(app: Starlette, start: dict[str, Any], generated: list[GenerateChunk]) -> list[bytes]:
    """Each event of the body by itself."""
    usage = GenerateChunk(request_id="r", choices=[], usage=Usage(3, len(IDS), 3 + len(IDS)))
    events = [start, *generated, usage]
    return [*(encode_event(msgspec.json.encode(event)) for event in events), DONE_EVENT]


def exchange_of(parts: list[bytes]) -> Exchange:
    return Exchange("POST", STREAM, {"content-type": "text/event-stream"}, parts)


def events_of(exchange: Exchange) -> list[Any]:
    decoder = SSEDecoder()
    *data, last = decoder.feed(exchange.content)
    assert (exchange.status, last) == (200, DONE), exchange.content
    return [json.loads(event) for event in data]


def gained(events: list[Any]) -> tuple[str, str, str, str]:
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
    finish = [c["finish_reason"] for event in events for c in event["choices"] if c["finish_reason"]]
    return (
        "".join(delta.get("content") or "" for delta in deltas),
        "".join(delta.get("reasoning") or "" for delta in deltas),
        "".join(piece["function"].get("arguments", "") for piece in calls),
        finish[0],
    )


@pytest.mark.parametrize("sends_prompt", [True, False])
def test_a_whole_stream_comes_back_as_openais(app: Starlette, sends_prompt: bool) -> None:
    options = {"stream_options": {"include_usage": True}}
    start = {"chat_request": {**CHAT, **options}, "prompt_token_ids": prompt_ids(app) if sends_prompt else None}
    for sizes in ([1] * (len(IDS) - 1), [4, 11], []):
        parts = body_of(app, start, chunks(sizes))
        for cut in (parts, [b"".join(parts)], [bytes([byte]) for byte in b"".join(parts)][:]):
            events = events_of(asyncio.run(exchange_of(list(cut)).run(app)))
            assert gained(events) == ("So: é", "why", '{"n": 7}', "tool_calls")
            assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert events[-1]["usage"]["completion_tokens"] == len(IDS)


def test_it_comes_as_the_tokens_come(app: Starlette) -> None:
    """The answer to a chunk is there before the next chunk is sent."""
    start = {"chat_request": CHAT, "prompt_token_ids": prompt_ids(app)}
    parts = body_of(app, start, chunks([4, 4, 4]))

    async def main() -> None:
        waiting: asyncio.Queue[bytes] = asyncio.Queue()
        answers: asyncio.Queue[bytes] = asyncio.Queue()
        exchange = exchange_of([])

        async def receive() -> Message:
            return {"type": "http.request", "body": await waiting.get(), "more_body": True}

        async def send(message: Message) -> None:
            await answers.put(message.get("body", b""))

        async def relay(scope: Any, _: Any, __: Any) -> None:
            await app(scope, receive, send)

        running = asyncio.create_task(exchange.run(relay))
        for part in parts[:2]:
            waiting.put_nowait(part)
        seen = b""
        while b"why" not in seen:
            seen += await answers.get()
        for part in parts[2:]:
            waiting.put_nowait(part)
        await running

    asyncio.run(main())


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([b""], None),
        ([encode_event(b"{")], None),
        ([encode_event(b"{}")], "chat_request"),
        ([encode_event(b'{"chat_request": {"messages": 1}}')], "chat_request.messages"),
        ([encode_event(b'{"chat_request": {"messages": [], "n": 0}, "prompt_token_ids": [1]}')], "chat_request.n"),
        ([encode_event(b'{"chat_request": {"messages": []}, "prompt_token_ids": [264]}')], "prompt_token_ids[0]"),
    ],
)
def test_a_body_that_begins_wrong_is_refused(app: Starlette, parts: list[bytes], param: str | None) -> None:
    exchange = asyncio.run(exchange_of(parts).run(app))
    assert exchange.status == 400
    assert json.loads(exchange.content)["error"]["param"] == param


def test_a_stream_that_goes_wrong_ends_with_an_error(app: Starlette) -> None:
    start = {"chat_request": CHAT, "prompt_token_ids": prompt_ids(app)}
    whole = body_of(app, start, chunks([4, 4]))
    outside = GenerateChunk(request_id="r", choices=[chunked([[VOCAB_SIZE]], None)[0]])
    failed = encode_event(b'{"error": {"message": "engine gone", "type": "X", "param": null, "code": 503}}')
    for end, code in [
        ([], 400),
        ([DONE_EVENT], 400),
        ([encode_event(msgspec.json.encode(outside))], 400),
        ([failed, DONE_EVENT], 503),
        ([encode_event(b"x" * 100_000)], 413),
    ]:
        last = events_of(asyncio.run(exchange_of([*whole[:3], *end]).run(app)))[-1]
        assert last["error"]["code"] == code
