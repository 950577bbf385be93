"""What a derender body must hold to. Each check raises ClientError with the field's path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from fourhop.wire.derender import MAX_STATE_BYTES, NULL, CompletionDerenderRequest, StreamState
from fourhop.wire.errors import ClientError, client_error
from fourhop.wire.generate import ChunkChoice, GenerateChoice, GenerateChunk, GenerateResponse
from fourhop.wire.logprobs import ChoiceLogprobs, PromptLogprobs

T = TypeVar("T")

_IDS: msgspec.json.Decoder[list[int] | None] = msgspec.json.Decoder(list[int] | None)
_ID_LISTS: msgspec.json.Decoder[list[list[int] | None] | None] = msgspec.json.Decoder(list[list[int] | None] | None)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`max_num_choices` holds for one body, `max_logprobs` for the alternatives of one token."""

    max_model_len: int
    vocab_size: int
    max_num_choices: int
    max_logprobs: int


def given(value: T | None, path: str) -> T:
    if value is None:
        raise ClientError(f"{path} is required", param=path)
    return value


def stream_state(raw: msgspec.Raw) -> StreamState | None:
    """The state of the last answer; null at first."""
    view = memoryview(raw)
    if view == memoryview(NULL):
        return None
    if view.nbytes > MAX_STATE_BYTES:
        raise ClientError(f"a stream state has at most {MAX_STATE_BYTES} bytes", param="stream_state")
    try:
        return msgspec.json.decode(raw, type=StreamState)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ClientError("the stream state is malformed", param="stream_state") from None


def prompt_ids(raw: msgspec.Raw, path: str, limits: Limits) -> list[int] | None:
    ids = _read(raw, _IDS, path)
    if ids is not None:
        _check_ids(ids, path, limits)
    return ids


def prompts(
    body: CompletionDerenderRequest, responses: list[GenerateResponse], limits: Limits
) -> tuple[list[int | None], list[list[int] | None]]:
    """For each response of a completion the size and the ids of its prompt, None where they are not given."""
    if not responses:
        raise ClientError("generate_responses must not be empty", param="generate_responses")
    if sum(len(generated.choices) for generated in responses) > limits.max_num_choices:
        raise ClientError(f"at most {limits.max_num_choices} choices are allowed", param="generate_responses")
    for number, generated in enumerate(responses):
        response(generated, f"generate_responses[{number}]", limits)
    if isinstance(body.prompt_tokens, int):
        raise ClientError("a list is expected, one number a response", param="prompt_tokens")
    nothing = [None] * len(responses)
    sizes: list[int | None] = list(nothing if body.prompt_tokens is None else body.prompt_tokens)
    given_ids = _read(body.prompt_token_ids, _ID_LISTS, "prompt_token_ids")
    ids: list[list[int] | None] = list(nothing if given_ids is None else given_ids)
    for path, values in (("prompt_tokens", sizes), ("prompt_token_ids", ids)):
        if len(values) != len(responses):
            raise ClientError(f"{path} must have one entry a response", param=path)
    for number, size in enumerate(sizes):
        prompt_tokens(size, limits, path=f"prompt_tokens[{number}]")
    for number, prompt in enumerate(ids):
        _check_ids(prompt or [], f"prompt_token_ids[{number}]", limits)
    return sizes, ids


def prompt_tokens(size: int | None, limits: Limits, *, path: str = "prompt_tokens") -> int | None:
    if size is not None and not 0 <= size <= limits.max_model_len:
        raise ClientError(f"{path} must be from 0 to {limits.max_model_len}", param=path)
    return size


def stream_prompt_tokens(size: int | list[int] | None, limits: Limits) -> int | None:
    if isinstance(size, list):
        raise ClientError("a number is expected with stream", param="prompt_tokens")
    return prompt_tokens(size, limits)


def response(generated: GenerateResponse, path: str, limits: Limits) -> None:
    """A whole answer: tokens, not text, and some in every choice."""
    _check_mode(generated.output_mode, path)
    if len(generated.choices) > limits.max_num_choices:
        raise ClientError(f"at most {limits.max_num_choices} choices are allowed", param=f"{path}.choices")
    _check_prompt_logprobs(generated.prompt_logprobs or [], f"{path}.prompt_logprobs", limits)
    for number, choice in enumerate(generated.choices):
        if not choice.token_ids:
            where = f"{path}.choices[{number}].token_ids"
            raise ClientError(f"{where} must not be empty", param=where)
        _check_choice(choice, f"{path}.choices[{number}]", limits)


def only_choice(chunk: GenerateChunk, limits: Limits) -> ChunkChoice | None:
    """The choice of a chunk; None for a usage chunk."""
    _check_mode(chunk.output_mode, "generate_chunk")
    _check_prompt_logprobs(chunk.prompt_logprobs or [], "generate_chunk.prompt_logprobs", limits)
    if len(chunk.choices) > 1:
        raise ClientError("a chunk must have at most one choice", param="generate_chunk.choices")
    for choice in chunk.choices:
        _check_choice(choice, "generate_chunk.choices[0]", limits)
        return choice
    return None


def window(num_tokens: int, limits: Limits) -> None:
    if num_tokens > limits.max_model_len:
        raise ClientError(
            f"prompt and output have {num_tokens} tokens, more than the window of {limits.max_model_len}",
            param="generate_chunk.choices[0].token_ids",
        )


def _check_mode(output_mode: str, path: str) -> None:
    if output_mode != "tokens":
        raise ClientError("only the output of output_mode tokens can be derendered", param=f"{path}.output_mode")


def _check_choice(choice: ChunkChoice | GenerateChoice, path: str, limits: Limits) -> None:
    if choice.index < 0 or choice.index >= limits.max_num_choices:
        raise ClientError(f"index must be from 0 to {limits.max_num_choices - 1}", param=f"{path}.index")
    _check_ids(choice.token_ids, f"{path}.token_ids", limits)
    if choice.logprobs is not None:
        _check_logprobs(choice.logprobs, len(choice.token_ids), f"{path}.logprobs.content", limits)


def _check_logprobs(logprobs: ChoiceLogprobs, num_tokens: int, path: str, limits: Limits) -> None:
    """One entry a token. An engine may add the chosen token to the alternatives that were asked for."""
    if len(logprobs.content) != num_tokens:
        raise ClientError(f"there must be one entry a token, {num_tokens}", param=path)
    most = max((len(entry.top_logprobs) for entry in logprobs.content), default=0)
    ids = [top.token_id for entry in logprobs.content for top in entry.top_logprobs]
    ids += [entry.token_id for entry in logprobs.content]
    if most <= limits.max_logprobs + 1 and _are_ids(ids, limits):
        return  # at once, since there are thousands; where something is wrong, it is looked for
    for number, entry in enumerate(logprobs.content):
        if len(entry.top_logprobs) > limits.max_logprobs + 1:
            where = f"{path}[{number}].top_logprobs"
            raise ClientError(f"at most {limits.max_logprobs} alternatives are allowed", param=where)
        _check_ids([entry.token_id, *(top.token_id for top in entry.top_logprobs)], f"{path}[{number}]", limits)


def _check_prompt_logprobs(told: PromptLogprobs, path: str, limits: Limits) -> None:
    """Of a prompt that fits the window. An engine adds the prompt's own token to the alternatives."""
    if len(told) > limits.max_model_len:
        raise ClientError(f"more than {limits.max_model_len} entries", param=path)
    for number, entry in enumerate(told):
        if len(entry or {}) > limits.max_logprobs + 1:
            where = f"{path}[{number}]"
            raise ClientError(f"at most {limits.max_logprobs} alternatives are allowed", param=where)
        _check_ids(list(entry or {}), f"{path}[{number}]", limits)


def _check_ids(ids: list[int], path: str, limits: Limits) -> None:
    if len(ids) > limits.max_model_len:
        raise ClientError(f"{len(ids)} tokens are more than the window of {limits.max_model_len}", param=path)
    if not _are_ids(ids, limits):
        raise ClientError(f"token ids must be from 0 to {limits.vocab_size - 1}", param=path)


def _are_ids(ids: list[int], limits: Limits) -> bool:
    return not ids or (min(ids) >= 0 and max(ids) < limits.vocab_size)


def _read(raw: msgspec.Raw, decoder: msgspec.json.Decoder[T], path: str) -> T:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise client_error(error, path) from None
