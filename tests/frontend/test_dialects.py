"""The responses and messages APIs: through their own clients, and what is peculiar to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from starlette.applications import Starlette

from fakes.asgi import post
from fakes.derendering import encode
from fakes.token_server import ScriptedTokenServer
from fakes.toy import EOS, TEMPLATE_TT, write_toy_checkpoint
from fourhop.checkpoint import Checkpoint
from fourhop.frontend.app import create
from fourhop.frontend.config import FrontendConfig
from fourhop.service import ServerConfig
from fourhop.wire.errors import ErrorBody, PeerError, PeerRefused, Unavailable
from fourhop.wire.generate import FinishReason

CONFIG = FrontendConfig(
    served_model_name=("toy",), reasoning_parser="qwen3", tool_call_parser="hermes", enable_auto_tool_choice=True
)
ANSWER = "hm</think>Hi!"
CALLS = 'hm</think>So:<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OPENAI_TOOL: Any = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}
ANTHROPIC_TOOL: Any = {"name": "f", "description": "d", "input_schema": SCHEMA}
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"), template=TEMPLATE_TT)


def script(text: str = ANSWER, finish: FinishReason = "stop", **fields: Any) -> ScriptedTokenServer:
    """One token a step."""
    ids = [*encode(text), *([EOS] if finish == "stop" else [])]
    return ScriptedTokenServer([[token_id] for token_id in ids], finish=finish, **fields)


def make_app(folder: Path, upstream: ScriptedTokenServer, **server: Any) -> Starlette:
    return create(CONFIG, Checkpoint("toy", folder), ServerConfig(**server), upstream)


def send(app: Starlette, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    exchange = asyncio.run(post(path, json.dumps(body).encode()).run(app))
    return exchange.status, json.loads(exchange.content)


def stream(app: Starlette, path: str, body: dict[str, Any]) -> list[Any]:
    """The events' data, each under the name that it has inside too."""
    exchange = asyncio.run(post(path, json.dumps({**body, "stream": True}).encode()).run(app))
    assert exchange.status == 200, exchange.content
    pairs = [event.split("\n") for event in exchange.content.decode().strip().split("\n\n")]
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]
    assert all(name == data["type"] for name, data in events)
    return [data for _, data in events]


def with_openai(app: Starlette, use: Callable[[AsyncOpenAI], Awaitable[None]]) -> None:
    async def run() -> None:
        async with (
            httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as http,
            AsyncOpenAI(base_url="http://toy/v1", api_key="secret", http_client=http, max_retries=0) as client,
        ):
            await use(client)

    asyncio.run(run())


def with_anthropic(app: Starlette, use: Callable[[AsyncAnthropic], Awaitable[None]]) -> None:
    async def run() -> None:
        async with (
            httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as http,
            AsyncAnthropic(base_url="http://toy", api_key="secret", http_client=http, max_retries=0) as client,
        ):
            await use(client)

    asyncio.run(run())


def test_responses_through_openais_client(folder: Path) -> None:
    async def use(client: AsyncOpenAI) -> None:
        whole = await client.responses.create(model="toy", input="hi", tools=[OPENAI_TOOL])
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
        assert (whole.output_text, whole.status) == ("So:", "completed")
        call: Any = whole.output[2]
        assert (call.name, json.loads(call.arguments), call.status) == ("f", {"a": 1}, "completed")
        assert whole.usage is not None
        assert whole.usage.output_tokens == len(encode(CALLS)) + 1
        assert whole.usage.output_tokens_details.reasoning_tokens == 2
        async with client.responses.stream(model="toy", input="hi", tools=[OPENAI_TOOL]) as events:
            kinds = [event.type async for event in events]
            streamed = await events.get_final_response()
        assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
        assert streamed.output_text == whole.output_text
        assert [item.type for item in streamed.output] == [item.type for item in whole.output]
        assert streamed.usage == whole.usage

    with_openai(make_app(folder, script(CALLS), api_key=("secret",)), use)


def test_messages_through_anthropics_client(folder: Path) -> None:
    async def use(client: AsyncAnthropic) -> None:
        options: Any = {"model": "toy", "max_tokens": 90, "messages": USER, "tools": [ANTHROPIC_TOOL]}
        whole = await client.messages.create(**options)
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
        thought, text, call = (block.to_dict() for block in whole.content)
        assert (thought["thinking"], text["text"], call["input"]) == ("hm", "So:", {"a": 1})
        assert whole.stop_reason == "tool_use"
        assert whole.usage.output_tokens == len(encode(CALLS)) + 1
        async with client.messages.stream(**options) as events:
            streamed = await events.get_final_message()
        assert [block.to_dict() | {"id": ""} for block in streamed.content] == [
            block.to_dict() | {"id": ""} for block in whole.content
        ]
        assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
        counted = await client.messages.count_tokens(model="toy", messages=USER)
        assert counted.input_tokens == whole.usage.input_tokens

    with_anthropic(make_app(folder, script(CALLS), api_key=("secret",)), use)


def test_a_conversation_of_the_messages_api_is_rendered_as_the_same_chat(folder: Path) -> None:
    body = {
        "max_tokens": 7,
        "system": [{"type": "text", "text": "be brief"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "So:"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "7 degrees"}]},
                    {"type": "text", "text": "and now?"},
                ],
            },
        ],
        "stop_sequences": ["."],
        "top_k": 5,
    }
    chat = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "reasoning_content": "hm",
                "content": "So:",
                "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": '{"a":1}'}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "7 degrees"},
            {"role": "user", "content": "and now?"},
        ],
        "max_completion_tokens": 7,
        "stop": ["."],
        "top_k": 5,
    }
    app = make_app(folder, script())
    status, rendered = send(app, "/v1/messages/render", body)
    assert status == 200, rendered
    _, expected = send(app, "/v1/chat/completions/render", chat)
    assert rendered["token_ids"] == expected["token_ids"]
    assert rendered["sampling_params"] == expected["sampling_params"]


def test_a_conversation_of_the_responses_api_is_rendered_as_the_same_chat(folder: Path) -> None:
    body = {
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So:"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "7 degrees"},
            {"role": "user", "content": [{"type": "input_text", "text": "and now?"}]},
        ],
        "max_output_tokens": 7,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    }
    chat = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "reasoning_content": "hm",
                "content": "So:",
                "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": '{"a":1}'}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "7 degrees"},
            {"role": "user", "content": "and now?"},
        ],
        "max_completion_tokens": 7,
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    }
    app = make_app(folder, script())
    status, rendered = send(app, "/v1/responses/render", {**body, "request_id": "me"})
    assert (status, rendered["request_id"]) == (200, "me"), rendered
    _, expected = send(app, "/v1/chat/completions/render", chat)
    assert rendered["token_ids"] == expected["token_ids"]
    assert rendered["sampling_params"] == expected["sampling_params"]


@pytest.mark.parametrize(
    ("finish", "fields", "status", "stop_reason"),
    [
        ("length", {}, "incomplete", "max_tokens"),
        ("stop", {}, "completed", "end_turn"),
        ("stop", {"stop": ["!"]}, "completed", "stop_sequence"),
    ],
)
def test_how_answers_end(
    folder: Path, finish: FinishReason, fields: dict[str, Any], status: str, stop_reason: str
) -> None:
    app = make_app(folder, script(finish=finish))
    _, response = send(app, RESPONSES, {"input": "hi"})
    assert response["status"] == ("incomplete" if finish == "length" else "completed")
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if finish == "length" else None)
    body = {"messages": USER, "max_tokens": 30, "stop_sequences": fields.get("stop")}
    _, message = send(app, MESSAGES, body)
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, fields.get("stop", [None])[0])
    delta = stream(app, MESSAGES, body)[-2]
    assert (delta["type"], delta["delta"]["stop_reason"]) == ("message_delta", stop_reason)
    assert status == stream(app, RESPONSES, {"input": "hi"})[-1]["response"]["status"]


def test_thinking_switches_the_template(folder: Path) -> None:
    app = make_app(folder, script())
    prompts = [
        send(app, "/v1/messages/render", {"messages": USER, "max_tokens": 5, "thinking": thinking})[1]["token_ids"]
        for thinking in (None, {"type": "enabled", "budget_tokens": 9}, {"type": "disabled"})
    ]
    assert prompts[0] == prompts[1] != prompts[2]


@pytest.mark.parametrize(
    ("path", "fields", "word"),
    [
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        (MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (MESSAGES, {"messages": []}, "messages"),
        (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        (MESSAGES, {"stop_sequences": [""]}, "stop_sequences[0]"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGES, {"top_p": 2}, "top_p"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"max_output_tokens": 5000}, "max_output_tokens"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include[0]"),
        (RESPONSES, {"truncation": "auto"}, "truncation"),
    ],
)
def test_refusals_name_the_clients_field_in_the_apis_shape(
    folder: Path, path: str, fields: dict[str, Any], word: str
) -> None:
    good = {"messages": USER, "max_tokens": 5} if path == MESSAGES else {"input": "hi"}
    status, body = send(make_app(folder, script()), path, {**good, **fields})
    assert status == 400, body
    if path == MESSAGES:
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert word in body["error"]["message"]
    else:
        assert body["error"]["param"] == word


def test_errors_from_below_have_the_apis_shape(folder: Path) -> None:
    param = "sampling_params.max_tokens"
    refusal = PeerRefused(400, ErrorBody(f"{param}: no", "BadRequestError", param, 400))
    app = make_app(folder, script(stop_before=0, error=refusal))
    assert send(app, RESPONSES, {"input": "hi"})[1]["error"]["param"] == "max_output_tokens"
    busy = make_app(folder, script(stop_before=0, error=Unavailable("busy", retry_after_s=2.0)))
    status, body = send(busy, MESSAGES, {"messages": USER, "max_tokens": 5})
    assert (status, body["error"]["type"]) == (503, "overloaded_error")
    late = make_app(folder, script(stop_before=2, error=PeerError("engine gone")))
    message = stream(late, MESSAGES, {"messages": USER, "max_tokens": 5})
    assert message[-1] == {"type": "error", "error": {"type": "api_error", "message": "engine gone"}}
    assert stream(late, RESPONSES, {"input": "hi"})[-1]["type"] == "error"


def test_events_are_numbered_and_blocks_closed(folder: Path) -> None:
    app = make_app(folder, script(CALLS))
    events = stream(app, RESPONSES, {"input": "hi", "tools": [OPENAI_TOOL]})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    blocks = stream(app, MESSAGES, {"messages": USER, "max_tokens": 90, "tools": [ANTHROPIC_TOOL]})
    begun = [event["index"] for event in blocks if event["type"] == "content_block_start"]
    ended = [event["index"] for event in blocks if event["type"] == "content_block_stop"]
    assert begun == ended == [0, 1, 2]
