"""What a request may ask for: cases 17 and 55."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fourhop.tokens.limits import Limits, check_request, resolve_max_tokens
from fourhop.wire.errors import ClientError
from fourhop.wire.generate import GenerateRequest

LIMITS = Limits(vocab_size=264, max_model_len=1024, max_num_choices=4, max_logprobs=5)
UNKNOWN = Limits(vocab_size=None, max_model_len=None, max_num_choices=4, max_logprobs=5)


def request(prompt: list[int] | int = 10, output: int = 0, transfer: Any = None, **params: Any) -> GenerateRequest:
    ids = [1] * prompt if isinstance(prompt, int) else prompt
    body = {
        "token_ids": ids,
        "sampling_params": params,
        "output_token_ids": [1] * output,
        "kv_transfer_params": transfer,
    }
    return msgspec.convert(body, GenerateRequest)


REFUSED: list[tuple[GenerateRequest, str]] = [
    (request([]), "token_ids"),
    (request([-1]), "token_ids[0]"),
    (request([5, 264]), "token_ids[1]"),
    (request([10**18]), "token_ids[0]"),
    (request([10**30]), "token_ids[0]"),
    (request(stop_token_ids=[264]), "sampling_params.stop_token_ids[0]"),
    (request(stop_token_ids=[-1]), "sampling_params.stop_token_ids[0]"),
    (request(logit_bias={"264": 1.0}), "sampling_params.logit_bias"),
    (request(logit_bias={"-1": 1.0}), "sampling_params.logit_bias.-1"),
    (request(logit_bias={"x": 1.0}), "sampling_params.logit_bias.x"),
    (request(logit_bias={"٣": 1.0}), "sampling_params.logit_bias.٣"),
    (request(logit_bias={"1" * 5000: 1.0}), "sampling_params.logit_bias"),
    (request(logit_bias={"5": 1000.0}), "sampling_params.logit_bias.5"),
    (request(allowed_token_ids=[264]), "sampling_params.allowed_token_ids[0]"),
    (request(allowed_token_ids=[]), "sampling_params.allowed_token_ids"),
    (request(n=0), "sampling_params.n"),
    (request(n=5), "sampling_params.n"),
    (request(n=2, output=1), "sampling_params.n"),
    (request(n=2, transfer={"do_remote_decode": True}), "sampling_params.n"),
    (request(logprobs=6), "sampling_params.logprobs"),
    (request(logprobs=-1), "sampling_params.logprobs"),
    (request(max_tokens=0), "sampling_params.max_tokens"),
    (request(max_tokens=-1), "sampling_params.max_tokens"),
    (request(max_tokens=5, min_tokens=6), "sampling_params.min_tokens"),
    (request(min_tokens=-1), "sampling_params.min_tokens"),
    (request(temperature=-0.1), "sampling_params.temperature"),
    (request(temperature=2.1), "sampling_params.temperature"),
    (request(temperature=float("nan")), "sampling_params.temperature"),
    (request(top_p=0.0), "sampling_params.top_p"),
    (request(top_p=1.1), "sampling_params.top_p"),
    (request(top_k=-2), "sampling_params.top_k"),
    (request(min_p=1.1), "sampling_params.min_p"),
    (request(presence_penalty=2.1), "sampling_params.presence_penalty"),
    (request(frequency_penalty=-2.1), "sampling_params.frequency_penalty"),
    (request(repetition_penalty=0.0), "sampling_params.repetition_penalty"),
    (request(seed=2**64), "sampling_params.seed"),
    (request(10, max_tokens=1020), "sampling_params.max_tokens"),
    (request(1024, max_tokens=1), "token_ids"),
    (request(1024), "token_ids"),
    (request(1000, output=24), "sampling_params.max_tokens"),
    (request(max_tokens=3, output=3), "output_token_ids"),
    (request(transfer={"do_remote_prefill": True}), "kv_transfer_params.ticket_id"),
    (request(transfer={"surprise": 1}), "kv_transfer_params"),
]


@pytest.mark.parametrize(("wrong", "param"), REFUSED, ids=[f"{n}-{param[:50]}" for n, (_, param) in enumerate(REFUSED)])
def test_refused(wrong: GenerateRequest, param: str) -> None:
    with pytest.raises(ClientError) as refused:
        check_request(wrong, LIMITS)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    "good",
    [
        request([0, 263]),
        request(logit_bias={}),
        request(logit_bias={"5": -100.0, "263": 100.0}),
        request(stop_token_ids=[263]),
        request(top_k=-1, temperature=0.0, seed=-1, logprobs=0),
        request(10, max_tokens=1014),
        request(1023),
        request(1023, max_tokens=1),
        request(max_tokens=3, output=2),
        request(max_tokens=1, min_tokens=3, transfer={"do_remote_decode": True}),
        request(transfer={"do_remote_decode": False, "do_remote_prefill": False, "remote_host": None}),
        request(n=4),
    ],
)
def test_accepted(good: GenerateRequest) -> None:
    check_request(good, LIMITS)
    check_request(good, UNKNOWN)


def test_the_message_names_window_prompt_and_limit() -> None:
    with pytest.raises(ClientError) as refused:
        check_request(request(10, max_tokens=1020), LIMITS)
    assert all(number in refused.value.message for number in ("1024", "10", "1020"))


def test_what_is_not_known_here_is_left_to_the_next_hop() -> None:
    check_request(request([10**6], max_tokens=10**6), UNKNOWN)
    with pytest.raises(ClientError):
        check_request(request([-1]), UNKNOWN)


@pytest.mark.parametrize(("num_prompt", "asked", "resolved"), [(10, None, 1014), (1023, None, 1), (10, 16, 16)])
def test_no_limit_is_the_rest_of_the_window(num_prompt: int, asked: int | None, resolved: int) -> None:
    assert resolve_max_tokens(request(num_prompt, max_tokens=asked), 1024).sampling_params.max_tokens == resolved
