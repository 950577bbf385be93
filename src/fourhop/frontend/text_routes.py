"""The endpoints that need no token server: models, tokenize, detokenize, render and derender."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fourhop.frontend.derender_batch import derender_batch
from fourhop.frontend.derender_checks import Limits
from fourhop.frontend.derender_endpoints import derender_chat, derender_completion
from fourhop.frontend.derender_stream import derender_stream
from fourhop.frontend.pipeline import Pipeline, new_id
from fourhop.frontend.render import Renderer
from fourhop.frontend.sampling import check_chat
from fourhop.frontend.served import Served
from fourhop.frontend.workers import RenderWorkers
from fourhop.service import json_response, read_body
from fourhop.tokens.limits import check_token_ids
from fourhop.wire.derender import NULL, ChatDerenderBatch, ChatDerenderRequest, CompletionDerenderRequest
from fourhop.wire.errors import ClientError
from fourhop.wire.openai import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from fourhop.wire.openai_chat import ChatCompletionRequest
from fourhop.wire.openai_completion import CompletionRequest

MAX_SHORT_TOKENS = 16
"""Of a chunk that is derendered at once, on the event loop: a fraction of a millisecond."""


def text_routes(pipeline: Pipeline) -> list[Route]:
    """Routes whose work runs in the render threads."""
    texts = _Texts(pipeline, created=int(pipeline.now_s()), served=_served(pipeline.renderer))
    return [
        Route("/v1/models", texts.models),
        Route("/tokenize", texts.tokenize, methods=["POST"]),
        Route("/detokenize", texts.detokenize, methods=["POST"]),
        Route("/v1/chat/completions/render", texts.render_chat, methods=["POST"]),
        Route("/v1/completions/render", texts.render_completion, methods=["POST"]),
        Route("/v1/chat/completions/derender", texts.derender_chat, methods=["POST"]),
        Route("/v1/chat/completions/derender/batch", texts.derender_batch, methods=["POST"]),
        Route("/v1/chat/completions/derender/stream", texts.derender_stream, methods=["POST"]),
        Route("/v1/completions/derender", texts.derender_completion, methods=["POST"]),
    ]


@dataclass(frozen=True)
class _Texts:
    pipeline: Pipeline
    created: int
    served: Served

    @property
    def renderer(self) -> Renderer:
        return self.pipeline.renderer

    @property
    def workers(self) -> RenderWorkers:
        return self.pipeline.workers

    def now_s(self) -> int:
        """Unix time."""
        return int(self.pipeline.now_s())

    async def models(self, request: Request) -> Response:
        model = self.renderer.model
        cards = [
            ModelCard(id=name, created=self.created, max_model_len=model.max_model_len, root=model.name)
            for name in model.names
        ]
        return json_response(ModelList(cards))

    async def tokenize(self, request: Request) -> Response:
        body = await read_body(request, TokenizeRequest)
        return json_response(await self.workers.run_for(request, tokenize, body, self.renderer))

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest)
        return json_response(await self.workers.run_for(request, detokenize, body, self.renderer))

    async def render_chat(self, request: Request) -> Response:
        body = await read_body(request, ChatCompletionRequest)
        name = new_id(request, body.request_id)
        return json_response(await self.workers.run_for(request, self.renderer.chat, body, name))

    async def render_completion(self, request: Request) -> Response:
        body = await read_body(request, CompletionRequest)
        name = new_id(request, body.request_id)
        return json_response(await self.workers.run_for(request, self.renderer.completion, body, name))

    async def derender_chat(self, request: Request) -> Response:
        body = await read_body(request, ChatDerenderRequest)
        if _is_short(body):
            return json_response(derender_chat(body, self.served, created=self.now_s()))
        answer = await self.workers.run_for(request, derender_chat, body, self.served, created=self.now_s())
        return json_response(answer)

    async def derender_batch(self, request: Request) -> Response:
        body = await read_body(request, ChatDerenderBatch)
        answer = await self.workers.run_for(request, derender_batch, body, self.served, created=self.now_s())
        return json_response(answer)

    async def derender_stream(self, request: Request) -> Response:
        return await derender_stream(request, self.pipeline, self.served.limits)

    async def derender_completion(self, request: Request) -> Response:
        body = await read_body(request, CompletionDerenderRequest)
        answer = await self.workers.run_for(request, derender_completion, body, self.served, created=self.now_s())
        return json_response(answer)


def _is_short(request: ChatDerenderRequest) -> bool:
    """Whether this is a few tokens in the middle of a stream: less work than handing it to a thread and back."""
    chunk = request.generate_chunk
    if not request.stream or request.stream_state == NULL or chunk is None or chunk.prompt_logprobs is not None:
        return False
    return sum(len(choice.token_ids) for choice in chunk.choices) <= MAX_SHORT_TOKENS


def tokenize(request: TokenizeRequest, renderer: Renderer) -> TokenizeResponse:
    """The ids of a prompt, or of a chat as a completion of it would have them."""
    renderer.model.check_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ClientError("give either prompt or messages", param="prompt")
    if request.prompt is not None:
        ids = renderer.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False).token_ids
    else:
        ids = _chat_ids(request, renderer)
    return TokenizeResponse(
        count=len(ids),
        max_model_len=renderer.model.max_model_len,
        tokens=ids,
        token_strs=[renderer.tokenizer.token(i) for i in ids] if request.return_token_strs else None,
    )


def _chat_ids(request: TokenizeRequest, renderer: Renderer) -> list[int]:
    """`tool_choice` is "none": whether calls would be parsed does not change the prompt."""
    chat = ChatCompletionRequest(
        messages=request.messages or [],
        tools=request.tools,
        tool_choice="none",
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=bool(request.add_special_tokens),
    )
    check_chat(chat, renderer.config)
    return renderer.chat_prompt(chat).token_ids


def detokenize(request: DetokenizeRequest, renderer: Renderer) -> DetokenizeResponse:
    """The text of ids, special tokens included."""
    renderer.model.check_name(request.model)
    check_token_ids(request.tokens, renderer.tokenizer.vocab_size, "tokens")
    return DetokenizeResponse(renderer.tokenizer.decode(request.tokens, skip_special_tokens=False))


def _served(renderer: Renderer) -> Served:
    return Served(
        model=renderer.model,
        tokenizer=renderer.tokenizer,
        parsers=renderer.parsers,
        limits=Limits(
            max_model_len=renderer.model.max_model_len,
            vocab_size=renderer.tokenizer.vocab_size,
            max_num_choices=renderer.config.max_num_choices,
            max_logprobs=renderer.config.max_logprobs,
        ),
        prompt_of=lambda request: renderer.chat_prompt(request).token_ids,
        eos_token_ids=renderer.model.eos_token_ids,
        default_chat_template_kwargs=renderer.config.default_chat_template_kwargs,
    )
