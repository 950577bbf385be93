"""The responses and messages APIs over the chat pipeline: requests become chat requests, and the answers theirs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fourhop.frontend import messages, messages_request, responses, responses_request
from fourhop.frontend.generation import Generation
from fourhop.frontend.life import Life
from fourhop.frontend.messages import Messages
from fourhop.frontend.names import rename
from fourhop.frontend.pipeline import Pipeline, new_id, respond
from fourhop.frontend.responses import Responses
from fourhop.frontend.sampling import check_chat
from fourhop.service import json_response, read_body
from fourhop.wire.anthropic import CountAnswer, CountRequest, MessagesRequest, message_error
from fourhop.wire.errors import FourhopError, error_headers
from fourhop.wire.generate import GenerateRequest
from fourhop.wire.openai_chat import ChatCompletionRequest
from fourhop.wire.responses import ResponsesRequest

Endpoint = Callable[[Request], Awaitable[Response]]


def dialect_routes(pipeline: Pipeline) -> list[Route]:
    """Their endpoints. Errors of the messages API have Anthropic's shape, those of the responses API OpenAI's."""
    dialects = _Dialects(pipeline)
    return [
        Route("/v1/responses", dialects.responses, methods=["POST"]),
        Route("/v1/responses/render", dialects.render_responses, methods=["POST"]),
        Route("/v1/messages", _in_its_shape(dialects.messages), methods=["POST"]),
        Route("/v1/messages/render", _in_its_shape(dialects.render_messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", _in_its_shape(dialects.count_tokens), methods=["POST"]),
    ]


@dataclass(frozen=True)
class _Dialects:
    pipeline: Pipeline

    async def responses(self, request: Request) -> Response:
        life = self.pipeline.life("responses", request)
        with life.watch():
            body = await read_body(request, ResponsesRequest)
            chat, name = responses_request.chat_of_responses(body), new_id(request, body.request_id)
            answer = Responses(
                request=body,
                id=f"resp_{name}",
                generation=await self._generation(request, life, chat, name, responses_request.NAMES),
                life=life,
                model=self.pipeline.renderer.model.name,
                created=int(self.pipeline.now_s()),
            )
        return await respond(request, answer, life, stream=bool(body.stream), failure=responses.error_events)

    async def render_responses(self, request: Request) -> Response:
        body = await read_body(request, ResponsesRequest)
        chat, name = responses_request.chat_of_responses(body), new_id(request, body.request_id)
        rendered = await self._render(request, chat, name, responses_request.NAMES)
        return json_response(msgspec.structs.replace(rendered, request_id=name))

    async def messages(self, request: Request) -> Response:
        life = self.pipeline.life("messages", request)
        with life.watch():
            body = await read_body(request, MessagesRequest)
            chat, name = messages_request.chat_of_messages(body, self._switches()), new_id(request, None)
            answer = Messages(
                id=f"msg_{name}",
                generation=await self._generation(request, life, chat, name, messages_request.NAMES),
                life=life,
                model=self.pipeline.renderer.model.name,
            )
        return await respond(request, answer, life, stream=bool(body.stream), failure=messages.error_events)

    async def render_messages(self, request: Request) -> Response:
        body = await read_body(request, MessagesRequest)
        chat = messages_request.chat_of_messages(body, self._switches())
        return json_response(await self._render(request, chat, new_id(request, None), messages_request.NAMES))

    async def count_tokens(self, request: Request) -> Response:
        body = await read_body(request, CountRequest)
        chat = messages_request.chat_of_prompt(body, self._switches())
        with _renamed(messages_request.NAMES):
            num_tokens = await self.pipeline.workers.run_for(request, self._count, chat)
            return json_response(CountAnswer(num_tokens))

    async def _generation(
        self, request: Request, life: Life, chat: ChatCompletionRequest, name: str, names: Mapping[str, str]
    ) -> Generation:
        """`names` are the client's own for fields of the chat request, now and later."""
        with _renamed(names):
            generation = await self.pipeline.chat(request, life, chat, name)
        generation.rename(names)
        return generation

    async def _render(
        self, request: Request, chat: ChatCompletionRequest, name: str, names: Mapping[str, str]
    ) -> GenerateRequest:
        with _renamed(names):
            return await self.pipeline.workers.run_for(request, self.pipeline.renderer.chat, chat, name)

    def _count(self, chat: ChatCompletionRequest) -> int:
        renderer = self.pipeline.renderer
        renderer.model.check_name(chat.model)
        check_chat(chat, renderer.config)
        return len(renderer.chat_prompt(chat).token_ids)

    def _switches(self) -> tuple[str, ...]:
        family = self.pipeline.renderer.parsers.reasoning
        return family.switches if family is not None else ()


def _in_its_shape(endpoint: Endpoint) -> Endpoint:
    """Anthropic's error body for what the endpoint refuses."""

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except FourhopError as error:
            return json_response(message_error(error), status=error.status, headers=error_headers(error))

    return guarded


@contextmanager
def _renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals speak of the client's own fields."""
    try:
        yield
    except FourhopError as error:
        rename(error, names)
        raise
