"""The description of the endpoints, and requests drawn from it: no answer is a 5xx, none fails to come."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Route

from fakes.asgi import get, post
from fakes.fuzzing import bodies
from fakes.token_server import ScriptedTokenServer
from fakes.toy import EOS, TEMPLATE_TT, write_toy_checkpoint
from fourhop.checkpoint import Checkpoint
from fourhop.frontend.app import create
from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.openapi import OPERATIONS, Operation, describe
from fourhop.service import ServerConfig
from fourhop.tokens.choices import merge_choices, split_choices, with_seed
from fourhop.tokens.limits import Limits, check_request
from fourhop.wire.generate import GenerateRequest

DOCUMENT = describe()
LIMITS = Limits(vocab_size=264, max_model_len=2048, max_num_choices=256, max_logprobs=20)
POSTS = [operation for operation in OPERATIONS if operation.body is not None]
ANSWER_TIMEOUT_S = 20.0


class Engine:
    """Checks what it gets as an engine does, and answers every choice with the same few tokens."""

    async def generate(self, request: GenerateRequest) -> Any:
        check_request(request, LIMITS)
        requests = split_choices(with_seed(request, lambda: 1))
        script = ScriptedTokenServer([[104], [259, 105], [EOS]], finish="stop")
        async for chunk in merge_choices([script.generate(each) for each in requests]):
            yield chunk


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Starlette:
    folder = write_toy_checkpoint(tmp_path_factory.mktemp("toy"), template=TEMPLATE_TT)
    config = FrontendConfig(
        served_model_name=("toy",), reasoning_parser="qwen3", tool_call_parser="hermes", enable_auto_tool_choice=True
    )
    return create(config, Checkpoint("toy", folder), ServerConfig(max_body_bytes=100_000), Engine())


def test_the_description_is_served_and_names_every_endpoint(app: Starlette) -> None:
    exchange = asyncio.run(get("/openapi.json").run(app))
    assert json.loads(exchange.content) == DOCUMENT
    served = {route.path for route in app.routes if isinstance(route, Route) and route.methods is not None}
    others = {"/health", "/metrics", "/version", "/openapi.json", "/v1/chat/completions/derender/stream"}
    assert served - others == set(DOCUMENT["paths"])


def test_every_reference_leads_somewhere() -> None:
    names = DOCUMENT["components"]["schemas"]
    references = set()
    pending: list[Any] = [DOCUMENT]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            references |= {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    assert references == {f"#/components/schemas/{name}" for name in names} & references
    assert references


def check(app: Starlette, operation: Operation, body: Any) -> None:
    exchange = post(operation.path, json.dumps(body).encode())
    asyncio.run(asyncio.wait_for(exchange.run(app), ANSWER_TIMEOUT_S))
    assert exchange.complete, body
    assert exchange.status < 500, (exchange.status, exchange.content, body)
    if exchange.status >= 400:
        error = json.loads(exchange.content)["error"]
        assert error["message"], body
    elif exchange.answer_headers["content-type"].startswith("application/json"):
        json.loads(exchange.content)


def body_of(operation: Operation) -> st.SearchStrategy[Any]:
    described = DOCUMENT["paths"][operation.path][operation.method]["requestBody"]
    return bodies(described["content"]["application/json"]["schema"], DOCUMENT["components"]["schemas"])


CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@pytest.mark.parametrize("operation", POSTS, ids=lambda operation: operation.path)
@settings(max_examples=25, deadline=None, suppress_health_check=CHECKS)
@given(data=st.data())
def test_drawn_requests_are_answered(app: Starlette, operation: Operation, data: st.DataObject) -> None:
    check(app, operation, data.draw(body_of(operation)))


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("operation", POSTS, ids=lambda operation: operation.path)
@settings(max_examples=1000, deadline=None, derandomize=False, suppress_health_check=CHECKS)
@given(data=st.data())
def test_many_drawn_requests_are_answered(app: Starlette, operation: Operation, data: st.DataObject) -> None:
    check(app, operation, data.draw(body_of(operation)))
