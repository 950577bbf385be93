"""What the two derender endpoints do: a decoded body in, the answer out. No HTTP, no clock.

Protocol: vLLM 0.32's derender, with a serialised state instead of the output so far. Where a call goes on from a state,
the prompt need not be sent, and is not read if it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from fourhop.frontend import derender_checks as checks
from fourhop.frontend.answers import Answer, chat_chunk_choice, completion_chunk_choice, usage_of
from fourhop.frontend.context import Context
from fourhop.frontend.derender import Delta, Derenderer
from fourhop.frontend.logprobs import prompt_texts
from fourhop.frontend.served import Served, context_of_chat, context_of_completion, inside, rendered_prompt
from fourhop.wire.derender import (
    ChatDerenderChunk,
    ChatDerenderRequest,
    CompletionDerenderChunk,
    CompletionDerenderRequest,
    StreamState,
)
from fourhop.wire.errors import ClientError
from fourhop.wire.generate import ChunkChoice, GenerateChoice, GenerateChunk, GenerateResponse, Usage
from fourhop.wire.logprobs import PromptLogprobs
from fourhop.wire.openai_chat import ChatCompletionChunk, ChatCompletionResponse
from fourhop.wire.openai_completion import (
    CompletionChoice,
    CompletionChunk,
    CompletionResponse,
)


def derender_chat(
    body: ChatDerenderRequest, served: Served, *, created: int
) -> ChatCompletionResponse | ChatDerenderChunk:
    """`POST /v1/chat/completions/derender`. Raises ClientError, NotFound for another model. `created` is Unix time."""
    served.model.check_name(body.model)
    checks.prompt_tokens(body.prompt_tokens, served.limits)
    if body.chat_request is None and served.parsers.has_any:
        raise ClientError("chat_request is required, since this server has parsers", param="chat_request")
    if body.stream:
        return _chat_chunk(body, checks.given(body.generate_chunk, "generate_chunk"), served, created)
    return _chat_response(body, checks.given(body.generate_response, "generate_response"), served, created)


def derender_completion(
    body: CompletionDerenderRequest, served: Served, *, created: int
) -> CompletionResponse | CompletionDerenderChunk:
    """`POST /v1/completions/derender`. Raises ClientError, NotFound for another model. `created` is Unix time."""
    served.model.check_name(body.model)
    if body.stream:
        return _completion_chunk(body, checks.given(body.generate_chunk, "generate_chunk"), served, created)
    responses = checks.given(body.generate_responses, "generate_responses")
    return _completion_response(body, responses, served, created)


def _chat_response(
    body: ChatDerenderRequest, generated: GenerateResponse, served: Served, created: int
) -> ChatCompletionResponse:
    checks.response(generated, "generate_response", served.limits)
    prompt = checks.prompt_ids(body.prompt_token_ids, "prompt_token_ids", served.limits)
    start = rendered_prompt(body, served) if prompt is None else prompt
    context = context_of_chat(body, start, generated.request_id, served)
    told = _prompt_texts(generated, served)
    answers = {choice.index: _answer(context, choice, told, "generate_response") for choice in generated.choices}
    returns_ids = body.chat_request is not None and body.chat_request.return_token_ids
    return ChatCompletionResponse(
        id=generated.request_id,
        created=created,
        model=body.model or served.model.name,
        choices=[answer.chat_choice(index, return_token_ids=returns_ids) for index, answer in answers.items()],
        usage=_usage(generated, list(answers.values()), _prompt_size(body.prompt_tokens, prompt, generated), served),
        prompt_logprobs=told,
        prompt_token_ids=generated.prompt_token_ids if returns_ids else None,
        kv_transfer_params=generated.kv_transfer_params,
    )


def _completion_response(
    body: CompletionDerenderRequest, responses: list[GenerateResponse], served: Served, created: int
) -> CompletionResponse:
    """Choices are numbered through; `kv_transfer_params` stays if all responses agree on it."""
    sizes, prompts = checks.prompts(body, responses, served.limits)
    returns_ids = body.completion_request is not None and body.completion_request.return_token_ids
    choices: list[CompletionChoice] = []
    usages: list[Usage] = []
    for number, (generated, size, prompt) in enumerate(zip(responses, sizes, prompts, strict=True)):
        context = context_of_completion(body, prompt, served)
        told = _prompt_texts(generated, served)
        path = f"generate_responses[{number}]"
        for answer in (answers := [_answer(context, choice, told, path) for choice in generated.choices]):
            choice = answer.completion_choice(len(choices), return_token_ids=returns_ids)
            choices.append(msgspec.structs.replace(choice, prompt_logprobs=told if _shows_prompt(body) else None))
        usages.append(_usage(generated, answers, _prompt_size(size, prompt, generated), served))
    transfer = responses[0].kv_transfer_params
    return CompletionResponse(
        id=responses[0].request_id,
        created=created,
        model=body.model or served.model.name,
        choices=choices,
        usage=usage_of(sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages)),
        kv_transfer_params=transfer if all(r.kv_transfer_params == transfer for r in responses) else None,
    )


def _answer(context: Context, choice: GenerateChoice, told: PromptLogprobs | None, path: str) -> Answer:
    """A choice that is not streamed is a stream of one chunk. `told` is of the prompt, `path` that of the response."""
    answer = Answer()
    chunk = ChunkChoice(
        choice.index, choice.token_ids, choice.finish_reason or "stop", choice.stop_reason, choice.logprobs
    )
    derenderer = Derenderer.start(context, choice.index)
    with inside(path):
        answer.add(derenderer.feed(chunk, told))
    return answer


def _prompt_texts(generated: GenerateResponse | GenerateChunk, served: Served) -> PromptLogprobs | None:
    told = generated.prompt_logprobs
    return None if told is None else prompt_texts(told, served.tokenizer)


def _shows_prompt(body: CompletionDerenderRequest) -> bool:
    """Whether what an engine told of the prompt was asked for by name, not only to be echoed."""
    return body.completion_request is None or body.completion_request.prompt_logprobs is not None


def _usage(generated: GenerateResponse, answers: list[Answer], prompt_tokens: int, served: Served) -> Usage:
    reasoning = sum(answer.num_reasoning_tokens for answer in answers) if served.parsers.has_reasoning else None
    return usage_of(
        prompt_tokens,
        sum(answer.num_tokens for answer in answers),
        reasoning_tokens=reasoning,
        prompt_details=generated.usage.prompt_tokens_details if generated.usage else None,
    )


def _prompt_size(told: int | None, prompt: list[int] | None, generated: GenerateResponse) -> int:
    """What the client told, else what it sent, else what the engine counted."""
    if told is not None:
        return told
    if prompt is not None:
        return len(prompt)
    return generated.usage.prompt_tokens if generated.usage else 0


def _chat_chunk(body: ChatDerenderRequest, chunk: GenerateChunk, served: Served, created: int) -> ChatDerenderChunk:
    def context(prompt: list[int] | None) -> Context:
        return context_of_chat(body, prompt, chunk.request_id, served)

    step = _advance(body, chunk, served, context, needs_prompt=served.parsers.has_any)
    request = body.chat_request
    choices = []
    if step.choice is not None:
        returns_ids = request is not None and request.return_token_ids
        entry = chat_chunk_choice(step.choice.index, step.delta, is_first=step.is_first, return_token_ids=returns_ids)
        # vLLM writes the empty fields of these deltas out.
        whole = msgspec.structs.replace(
            entry.delta, content=step.delta.content, reasoning=step.delta.reasoning, tool_calls=step.delta.tool_calls
        )
        choices.append(msgspec.structs.replace(entry, delta=whole))
    answer = ChatCompletionChunk(
        id=chunk.request_id,
        created=created,
        model=body.model or served.model.name,
        choices=choices,
        usage=_chunk_usage(chunk, step, request.n if request else 1, served),
        prompt_logprobs=_prompt_texts(chunk, served) or UNSET,
        kv_transfer_params=UNSET if chunk.kv_transfer_params is None else chunk.kv_transfer_params,
    )
    return ChatDerenderChunk(answer, step.state)


def _completion_chunk(
    body: CompletionDerenderRequest, chunk: GenerateChunk, served: Served, created: int
) -> CompletionDerenderChunk:
    def context(prompt: list[int] | None) -> Context:
        return context_of_completion(body, prompt, served)

    step = _advance(body, chunk, served, context, needs_prompt=False)
    request = body.completion_request
    returns_ids = request is not None and request.return_token_ids
    choices = []
    if step.choice is not None:
        entry = completion_chunk_choice(step.choice.index, step.delta, return_token_ids=returns_ids)
        told = _prompt_texts(chunk, served) if _shows_prompt(body) else None
        choices.append(msgspec.structs.replace(entry, prompt_logprobs=told or UNSET))
    answer = CompletionChunk(
        id=chunk.request_id,
        created=created,
        model=body.model or served.model.name,
        choices=choices,
        usage=_chunk_usage(chunk, step, request.n if request else 1, served),
        kv_transfer_params=UNSET if chunk.kv_transfer_params is None else chunk.kv_transfer_params,
    )
    return CompletionDerenderChunk(answer, step.state)


@dataclass(frozen=True)
class _Step:
    """One streamed call: `choice` is None for a usage chunk, `derenderer` None when there is no state either."""

    choice: ChunkChoice | None
    derenderer: Derenderer | None
    delta: Delta
    is_first: bool
    prompt_tokens: int | None

    @property
    def state(self) -> StreamState | None:
        return None if self.derenderer is None else self.derenderer.state()


def _advance(
    body: ChatDerenderRequest | CompletionDerenderRequest,
    chunk: GenerateChunk,
    served: Served,
    context: Callable[[list[int] | None], Context],
    *,
    needs_prompt: bool,
) -> _Step:
    """Start or resume the choice and feed it the chunk. A usage chunk moves nothing."""
    state = checks.stream_state(body.stream_state)
    choice = checks.only_choice(chunk, served.limits)
    size = checks.stream_prompt_tokens(body.prompt_tokens, served.limits)
    if state is not None:
        derenderer = Derenderer.resume(context(None), state)
    elif choice is None:
        return _Step(None, None, Delta(), False, size)
    else:
        prompt = checks.prompt_ids(body.prompt_token_ids, "prompt_token_ids", served.limits)
        if prompt is None and needs_prompt:
            raise ClientError("prompt_token_ids is required with the first chunk", param="prompt_token_ids")
        derenderer = Derenderer.start(context(prompt), choice.index)
    if choice is None:
        return _Step(None, derenderer, Delta(), False, size)
    checks.window((size or 0) + derenderer.num_tokens + len(choice.token_ids), served.limits)
    with inside("generate_chunk"):
        delta = derenderer.feed(choice, chunk.prompt_logprobs)
    return _Step(choice, derenderer, delta, state is None, size)


def _chunk_usage(chunk: GenerateChunk, step: _Step, n: int | None, served: Served) -> Usage | None:
    """The engine's usage with the client's prompt size. With one choice its own counts are known, and they win."""
    usage = chunk.usage
    if usage is None:
        return None
    is_only = step.derenderer is not None and (n or 1) == 1
    completion_tokens = step.derenderer.num_tokens if is_only and step.derenderer else usage.completion_tokens
    has_count = is_only and served.parsers.has_reasoning and step.derenderer
    return usage_of(
        usage.prompt_tokens if step.prompt_tokens is None else step.prompt_tokens,
        completion_tokens,
        reasoning_tokens=step.derenderer.num_reasoning_tokens if has_count and step.derenderer else None,
        prompt_details=usage.prompt_tokens_details,
    )
