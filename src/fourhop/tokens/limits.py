"""What a request may ask for: checks that every TokenServer makes before it starts, each naming the field's path.

Ranges are vLLM 0.32's (`SamplingParams`), tightened where a value could harm the model: every token id is compared
with the number of embeddings, which may differ from the tokenizer's length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, NoReturn

import msgspec

from fourhop.wire.errors import ClientError
from fourhop.wire.generate import GenerateRequest, SamplingParams
from fourhop.wire.structure import GrammarStart, parse_structure
from fourhop.wire.ticket import KVTicket, parse_transfer_params

PARAMS = "sampling_params"
MAX_SALT_CHARS = 128


@dataclass(frozen=True)
class Limits:
    """What a model and its server can take. None means that it is not known here and is checked further on."""

    vocab_size: int | None
    max_model_len: int | None
    max_num_choices: int
    max_logprobs: int


def check_request(request: GenerateRequest, limits: Limits) -> None:
    """Raise a ClientError for the first thing in the request that cannot be served."""
    check_settings(request, limits)
    check_token_ids(request.token_ids, limits.vocab_size, "token_ids")


def check_settings(request: GenerateRequest, limits: Limits) -> None:
    """The same but for the prompt's ids: each is looked at, which takes time, and who made them knows them."""
    check_supported(request)
    check_ranges(request.sampling_params)
    _check_counts(request, limits)
    _check_token_ids(request, limits.vocab_size)
    _check_window(request, limits.max_model_len)
    transfer = parse_transfer_params(request.kv_transfer_params)  # whether it is true is `verify`'s
    if isinstance(transfer, KVTicket) or request.output_token_ids:
        reason = "must be null where the prompt was computed elsewhere: the engine that did so gives them"
        _expect(request.sampling_params.prompt_logprobs is None, reason, "prompt_logprobs")


def resolve_max_tokens(request: GenerateRequest, max_model_len: int) -> GenerateRequest:
    """The request with `max_tokens` written out: its own, or the rest of the window."""
    params = request.sampling_params
    if params.max_tokens is not None:
        return request
    params = msgspec.structs.replace(params, max_tokens=max_model_len - len(request.token_ids))
    return msgspec.structs.replace(request, sampling_params=params)


def check_supported(request: GenerateRequest, *, routes: bool = False) -> None:
    """Refuse what a tokens-only server cannot do, rather than do something else. One that `routes` has a queue."""
    params = request.sampling_params
    if request.output_mode != "tokens":
        _refuse('only "tokens" is supported: this server has no tokenizer', "output_mode")
    for name in ("features", "content_parts"):
        if getattr(request, name) is not None:
            _refuse("multimodal input is not supported", name)
    if request.ec_transfer_params is not None:
        _refuse("encoder transfer is not supported", "ec_transfer_params")
    if request.stream_options is not None and not request.stream:
        _refuse("stream_options needs stream: true", "stream_options")
    if request.priority != 0 and not routes:
        _refuse("priorities are not supported", "priority")
    if request.targets is not None and not routes:
        _refuse("targets are not supported", "targets")
    if params.stop:
        _refuse("stop strings need a tokenizer; this server takes stop_token_ids only", f"{PARAMS}.stop")
    if params.bad_words:
        _refuse("bad words need a tokenizer; use logit_bias", f"{PARAMS}.bad_words")
    _check_structure(request)
    for name in params.extra_args or {}:
        _refuse("this argument is not supported", f"{PARAMS}.extra_args.{name}")
    _check_salt(request.cache_salt)


def _check_structure(request: GenerateRequest) -> None:
    """A grammar decides when an output ends and which tokens it has; nothing else may decide that too."""
    params, start = request.sampling_params, request.grammar_start
    if parse_structure(params.structured_outputs, f"{PARAMS}.structured_outputs") is None:
        return
    _expect(not params.min_tokens, "must be 0 with structured_outputs", "min_tokens")
    _expect(not params.ignore_eos, "must be false with structured_outputs", "ignore_eos")
    _expect(params.allowed_token_ids is None, "cannot be combined with structured_outputs", "allowed_token_ids")
    if start is not None and start.opening_token_id is not None and not start.closing_token_ids:
        _refuse("must not be empty with opening_token_id", "grammar_start.closing_token_ids")


def check_ranges(params: SamplingParams) -> None:
    """Sampling parameters that make sense for any model."""
    _expect(params.max_tokens is None or params.max_tokens >= 1, "must be at least 1", "max_tokens")
    _expect(params.min_tokens >= 0, "must not be negative", "min_tokens")
    _expect(0.0 <= params.temperature <= 2.0, "must be between 0 and 2", "temperature")
    _expect(0.0 < params.top_p <= 1.0, "must be above 0 and at most 1", "top_p")
    _expect(params.top_k >= -1, "must be at least 1, or 0 or -1 for all tokens", "top_k")
    _expect(0.0 <= params.min_p <= 1.0, "must be between 0 and 1", "min_p")
    _expect(-2.0 <= params.presence_penalty <= 2.0, "must be between -2 and 2", "presence_penalty")
    _expect(-2.0 <= params.frequency_penalty <= 2.0, "must be between -2 and 2", "frequency_penalty")
    _expect(params.repetition_penalty > 0.0, "must be above 0", "repetition_penalty")
    _expect(params.seed is None or -(2**63) <= params.seed < 2**64, "must fit 64 bits", "seed")
    _expect(params.allowed_token_ids != [], "must not be empty", "allowed_token_ids")
    for key, bias in (params.logit_bias or {}).items():
        _expect(-100.0 <= bias <= 100.0, "must be between -100 and 100", f"logit_bias.{key}")


def _check_counts(request: GenerateRequest, limits: Limits) -> None:
    params = request.sampling_params
    if not 1 <= params.n <= limits.max_num_choices:
        _refuse(f"must be between 1 and {limits.max_num_choices}, not {params.n}", f"{PARAMS}.n")
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and not 0 <= count <= limits.max_logprobs:
            _refuse(f"must be between 0 and {limits.max_logprobs}", f"{PARAMS}.{name}")
    if params.n > 1 and (request.output_token_ids or request.kv_transfer_params is not None):
        _refuse("must be 1 with output_token_ids or kv_transfer_params", f"{PARAMS}.n")


def _check_token_ids(request: GenerateRequest, vocab_size: int | None) -> None:
    params = request.sampling_params
    if not request.token_ids:
        _refuse("the prompt must have at least one token", "token_ids")
    check_token_ids(request.output_token_ids, vocab_size, "output_token_ids")
    check_token_ids(params.stop_token_ids, vocab_size, f"{PARAMS}.stop_token_ids")
    check_token_ids(params.allowed_token_ids or [], vocab_size, f"{PARAMS}.allowed_token_ids")
    start = request.grammar_start or GrammarStart()
    check_token_ids(start.closing_token_ids, vocab_size, "grammar_start.closing_token_ids")
    check_token_ids(start.free_token_ids, vocab_size, "grammar_start.free_token_ids")
    if start.opening_token_id is not None and not _in_range([start.opening_token_id], vocab_size):
        _refuse(_range_message(vocab_size), "grammar_start.opening_token_id")
    for key in params.logit_bias or {}:
        if not key.isascii() or not key.isdecimal():
            _refuse("keys must be token ids", f"{PARAMS}.logit_bias.{key[:20]}")
    keys = [int(key) for key in params.logit_bias or {} if len(key) < 20]
    if len(keys) != len(params.logit_bias or {}) or not _in_range(keys, vocab_size):
        _refuse(_range_message(vocab_size), f"{PARAMS}.logit_bias")


def _check_window(request: GenerateRequest, max_model_len: int | None) -> None:
    """Prompt and output fit the window, and the output so far leaves something to generate."""
    params, num_prompt, num_output = request.sampling_params, len(request.token_ids), len(request.output_token_ids)
    holds = request.kv_transfer_params is not None and request.kv_transfer_params.get("do_remote_decode")
    if params.max_tokens is not None:
        _expect(holds or params.min_tokens <= params.max_tokens, "must be at most max_tokens", "min_tokens")
        if num_output >= params.max_tokens:
            _refuse(f"has {num_output} tokens, max_tokens is {params.max_tokens}", "output_token_ids")
    if max_model_len is None:
        return
    if num_prompt >= max_model_len:
        _refuse(
            f"the prompt has {num_prompt} tokens; the model's maximum context length is {max_model_len} tokens, "
            f"and the request asks for {_asked(params)} more",
            "token_ids",
        )
    if num_prompt + max(params.max_tokens or 1, num_output + 1) > max_model_len:
        _refuse(
            f"the model's maximum context length is {max_model_len} tokens; the prompt has {num_prompt} and the "
            f"request asks for {_asked(params)} more, so at most {max_model_len - num_prompt} can be generated",
            f"{PARAMS}.max_tokens",
        )


def _asked(params: SamplingParams) -> int:
    return params.max_tokens if params.max_tokens is not None else 1


def _check_salt(salt: str | None) -> None:
    if salt is None:
        return
    if not 0 < len(salt) <= MAX_SALT_CHARS or any(character in "@/\\\0" for character in salt):
        _refuse(f"must be 1 to {MAX_SALT_CHARS} characters without @, / and \\", "cache_salt")


def check_token_ids(ids: list[int], vocab_size: int | None, param: str) -> None:
    """Raise a ClientError that names the first id that is not one of the model's, by its place in `param`."""
    if _in_range(ids, vocab_size):
        return
    bound = 2**31 if vocab_size is None else vocab_size
    index = next(index for index, token_id in enumerate(ids) if not 0 <= token_id < bound)
    _refuse(_range_message(vocab_size), f"{param}[{index}]")


def _in_range(ids: list[int], vocab_size: int | None) -> bool:
    """True if all are ids. Looked at in C: a prompt of 100,000 tokens costs a millisecond."""
    if not ids:
        return True
    try:
        msgspec.convert(ids, _ids_below(2**31 if vocab_size is None else vocab_size))
    except msgspec.ValidationError:
        return False
    return True


@cache
def _ids_below(bound: int) -> Any:
    """The type of a list of such ids."""
    return list[Annotated[int, msgspec.Meta(ge=0, lt=bound)]]


def _range_message(vocab_size: int | None) -> str:
    return "token ids must not be negative" if vocab_size is None else f"token ids must be in 0..{vocab_size - 1}"


def _expect(holds: object, message: str, field: str) -> None:
    if not holds:
        _refuse(message, f"{PARAMS}.{field}")


def _refuse(message: str, param: str) -> NoReturn:
    raise ClientError(f"{param}: {message}", param=param)
