"""What the client calls the fields of the GenerateRequest that its request became, for errors about them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from fourhop.frontend.structure import chat_structure, structure_of
from fourhop.tokens.limits import PARAMS
from fourhop.wire.errors import FourhopError
from fourhop.wire.openai_chat import ChatCompletionRequest
from fourhop.wire.openai_completion import CompletionRequest


def chat_names(request: ChatCompletionRequest) -> dict[str, str]:
    """What fields of a GenerateRequest are called in the chat request that it came from, where that differs."""
    structure = chat_structure(request)
    return {
        "token_ids": "messages",
        "logprobs": "top_logprobs",
        "max_tokens": "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens",
        **(structure.names() if structure else {}),
    }


def completion_names(request: CompletionRequest, path: str) -> dict[str, str]:
    """As `chat_names`, for the prompt at `path` of a completion request."""
    structure = structure_of(request)
    return {"token_ids": path, **(structure.names() if structure else {})}


def rename(error: FourhopError, names: Mapping[str, str]) -> None:
    """Make an error about a GenerateRequest speak of the client's own field, in its path and its message."""
    if error.param is None:
        return
    path = error.param.removeprefix(f"{PARAMS}.")
    for name, new in names.items():
        if path == name or path.startswith((f"{name}[", f"{name}.")):
            # What came from a conversation has no index that a client could know.
            path = new if new in ("messages", "input") else new + path.removeprefix(name)
            break
    if error.message.startswith(f"{error.param}:"):
        error.message = path + error.message.removeprefix(error.param)
    error.param = path
