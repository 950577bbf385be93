"""`GET /openapi.json`: what the frontend's endpoints take and answer, out of the types that they are decoded with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from fourhop import __version__
from fourhop.service import json_response
from fourhop.wire.anthropic import CountAnswer, CountRequest, MessageAnswer, MessageError, MessagesRequest
from fourhop.wire.derender import (
    ChatDerenderBatch,
    ChatDerenderBatchAnswer,
    ChatDerenderChunk,
    ChatDerenderRequest,
    CompletionDerenderChunk,
    CompletionDerenderRequest,
)
from fourhop.wire.errors import ErrorResponse
from fourhop.wire.generate import GenerateRequest
from fourhop.wire.openai import DetokenizeRequest, DetokenizeResponse, ModelList, TokenizeRequest, TokenizeResponse
from fourhop.wire.openai_chat import ChatCompletionRequest, ChatCompletionResponse
from fourhop.wire.openai_completion import CompletionRequest, CompletionResponse
from fourhop.wire.responses import Response, ResponsesRequest


@dataclass(frozen=True)
class Operation:
    """One endpoint: its body, if it takes one, and its answer in one piece, or a tuple of answers that it may give.

    `errors` is the shape of its refusals.
    """

    method: str
    path: str
    body: Any
    answer: Any
    errors: Any = ErrorResponse


OPERATIONS = (
    Operation("post", "/v1/chat/completions", ChatCompletionRequest, ChatCompletionResponse),
    Operation("post", "/v1/completions", CompletionRequest, CompletionResponse),
    Operation("post", "/v1/responses", ResponsesRequest, Response),
    Operation("post", "/v1/messages", MessagesRequest, MessageAnswer, MessageError),
    Operation("post", "/v1/messages/count_tokens", CountRequest, CountAnswer, MessageError),
    Operation("post", "/v1/chat/completions/render", ChatCompletionRequest, GenerateRequest),
    Operation("post", "/v1/completions/render", CompletionRequest, list[GenerateRequest]),
    Operation("post", "/v1/responses/render", ResponsesRequest, GenerateRequest),
    Operation("post", "/v1/messages/render", MessagesRequest, GenerateRequest, MessageError),
    Operation(
        "post", "/v1/chat/completions/derender", ChatDerenderRequest, (ChatCompletionResponse, ChatDerenderChunk)
    ),
    Operation("post", "/v1/chat/completions/derender/batch", ChatDerenderBatch, ChatDerenderBatchAnswer),
    Operation(
        "post", "/v1/completions/derender", CompletionDerenderRequest, (CompletionResponse, CompletionDerenderChunk)
    ),
    Operation("post", "/tokenize", TokenizeRequest, TokenizeResponse),
    Operation("post", "/detokenize", DetokenizeRequest, DetokenizeResponse),
    Operation("get", "/v1/models", None, ModelList),
)
"""Beside these, `POST /v1/chat/completions/derender/stream` takes and answers server-sent events, and `/health`,
`/metrics` and `/version` are those of every server."""


def describe(operations: Sequence[Operation] = OPERATIONS) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    types = [each for operation in operations for each in _types(operation)]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    found = dict(zip(map(str, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, found)
    return {
        "openapi": "3.1.0",
        "info": {"title": "fourhop frontend", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def openapi_route() -> Route:
    """Described when it is first asked for: a start does not wait for it."""
    described = cache(describe)

    async def openapi(request: Request) -> HttpResponse:
        return json_response(described())

    return Route("/openapi.json", openapi)


def _types(operation: Operation) -> list[Any]:
    body = [] if operation.body is None else [operation.body]
    return [*body, *_answers(operation), operation.errors]


def _answers(operation: Operation) -> tuple[Any, ...]:
    return operation.answer if isinstance(operation.answer, tuple) else (operation.answer,)


def _operation(operation: Operation, schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    def content(*types: Any) -> dict[str, Any]:
        given = [schemas[str(type)] for type in types]
        return {"content": {"application/json": {"schema": given[0] if len(given) == 1 else {"anyOf": given}}}}

    described: dict[str, Any] = {
        "operationId": operation.path.strip("/").replace("/", "_"),
        "responses": {
            "200": {"description": "The answer in one piece.", **content(*_answers(operation))},
            "4XX": {"description": "A refusal with the path of what is wrong.", **content(operation.errors)},
            "5XX": {"description": "The server, or one behind it, cannot answer.", **content(operation.errors)},
        },
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, **content(operation.body)}
    return described
