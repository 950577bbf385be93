"""What derendering needs of a server, and what it makes of a body for it: the context of its choices. No HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fourhop.frontend.context import Context, chat_context, completion_context
from fourhop.frontend.derender_checks import Limits
from fourhop.frontend.model import Model
from fourhop.frontend.parsers import Parsers
from fourhop.frontend.tokenizer import Tokenizer
from fourhop.wire.derender import ChatDerenderRequest, CompletionDerenderRequest
from fourhop.wire.errors import ClientError
from fourhop.wire.openai_chat import ChatCompletionRequest
from fourhop.wire.openai_completion import CompletionRequest


@dataclass(frozen=True, kw_only=True)
class Served:
    """The model whose tokens are derendered, and the limits that bodies are held to.

    `prompt_of` renders a chat again, where a client did not send the prompt and its end decides how to parse.
    """

    model: Model
    tokenizer: Tokenizer
    parsers: Parsers
    limits: Limits
    prompt_of: Callable[[ChatCompletionRequest], list[int]]
    eos_token_ids: frozenset[int] = frozenset()
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def context_of_chat(body: ChatDerenderRequest, prompt: list[int] | None, request_id: str, served: Served) -> Context:
    with inside("chat_request"):
        return chat_context(
            body.chat_request or ChatCompletionRequest(messages=[]),
            prompt,
            served.tokenizer,
            served.parsers,
            eos_token_ids=served.eos_token_ids,
            request_id=request_id,
            default_chat_template_kwargs=served.default_chat_template_kwargs,
        )


def rendered_prompt(body: ChatDerenderRequest, served: Served) -> list[int] | None:
    """The prompt of a chat whose answer begins inside or outside of thinking, as the prompt's end says."""
    if body.chat_request is None or not served.parsers.has_reasoning:
        return None
    with inside("chat_request"):
        return served.prompt_of(body.chat_request)


def context_of_completion(body: CompletionDerenderRequest, prompt: list[int] | None, served: Served) -> Context:
    request = body.completion_request or CompletionRequest(prompt="")
    with inside("completion_request"):
        return completion_context(request, prompt, served.tokenizer, eos_token_ids=served.eos_token_ids)


@contextmanager
def inside(field: str) -> Iterator[None]:
    """A field that is refused here is one of the value inside the body."""
    try:
        yield
    except ClientError as error:
        raise ClientError(error.message, param=f"{field}.{error.param}") from None
