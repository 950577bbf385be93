"""`COMPLETIONS`: tokens from `/v1/completions`, as any vLLM has it: prompts of token ids, and `return_token_ids`.

What the endpoint does not tell is not there: the rank of a token that is not among the likeliest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from fourhop.tokens.dialect import Dialect, ErrorEvent, Event, Whole
from fourhop.wire.generate import ChunkChoice, GenerateRequest, Usage
from fourhop.wire.logprobs import ChoiceLogprobs, PromptLogprobs, TokenLogprob, TopLogprob

TOKEN = re.compile(r"token_id:(\d+)", re.ASCII)

PARAMS = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "allowed_token_ids",
    "logprobs",
    "prompt_logprobs",
    "structured_outputs",
)
"""The sampling parameters that are about tokens. All are sent: what is left out a server takes from elsewhere."""


def encode(request: GenerateRequest) -> bytes:
    params = request.sampling_params
    body: dict[str, Any] = {name: getattr(params, name) for name in PARAMS}
    body |= {
        "prompt": request.token_ids,
        "stream": request.stream,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "kv_transfer_params": request.kv_transfer_params,
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "request_id": request.request_id,
    }
    if request.stream_options is not None:
        body["stream_options"] = request.stream_options
    return msgspec.json.encode(body)


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []

    def content(self) -> ChoiceLogprobs:
        tops = self.top_logprobs or [None] * len(self.tokens)
        return ChoiceLogprobs([_logprob(*one) for one in zip(self.tokens, self.token_logprobs, tops, strict=True)])


class _Choice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    finish_reason: Any = None
    stop_reason: str | int | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None

    def choice(self) -> ChunkChoice:
        if self.token_ids is None:
            raise msgspec.ValidationError("there are no token_ids, which were asked for")
        return msgspec.convert(
            ChunkChoice(
                self.index,
                self.token_ids,
                self.finish_reason,
                self.stop_reason,
                None if self.logprobs is None else self.logprobs.content(),
            ),
            ChunkChoice,
        )


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: ErrorEvent | None = None
    kv_transfer_params: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Answer).decode


def decode(data: bytes) -> Event:
    answer = _decode(data)
    return Event(choices=[one.choice() for one in answer.choices], usage=answer.usage, error=answer.error)


def decode_whole(data: bytes) -> Whole:
    answer = _decode(data)
    if answer.usage is None or not answer.choices:
        raise msgspec.ValidationError("there is no usage, or no choice")
    choices = [one.choice() for one in answer.choices]
    return Whole(choices, answer.usage, answer.choices[0].prompt_logprobs, answer.kv_transfer_params)


def _logprob(token: str, logprob: float | None, top: dict[str, float] | None) -> TokenLogprob:
    """One token. The likeliest ones include it, if it is not among them, as one more."""
    token_id, least = _token_id(token), -9999.0
    likely = sorted(((_token_id(name), value) for name, value in (top or {}).items()), key=lambda one: -one[1])
    ranked = [TopLogprob(one, value, rank) for rank, (one, value) in enumerate(likely, 1)]
    return TokenLogprob(token_id, least if logprob is None else logprob, None, ranked)


def _token_id(name: str) -> int:
    found = TOKEN.fullmatch(name)
    if found is None:
        raise msgspec.ValidationError(f"{name[:40]} is not the id of a token")
    return int(found[1])


def decode_all(several: Sequence[bytes]) -> list[Event]:
    return [decode(one) for one in several]


COMPLETIONS = Dialect("/v1/completions", encode, decode, decode_all, decode_whole)
