"""What clients ask in a storm, and what the answer must be."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from fakes.engines import VOCAB_SIZE
from fourhop.engine.toy import FIRST_TOKEN, NUM_TOKENS, toy_output
from fourhop.tokens.choices import choice_seed
from fourhop.wire.generate import GenerateRequest, SamplingParams

SALTS = (None, None, None, "a tenant", "another tenant")


@dataclass(frozen=True)
class Answer:
    """Of one choice."""

    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Ask:
    """A request, sent at a time; with `after` as soon as that one has ended, going on where it should have. The client
    leaves after `patience_s`."""

    number: int
    request: GenerateRequest
    at_s: float
    patience_s: float | None
    after: int | None
    is_direct: bool = False

    def describe(self) -> str:
        params = self.request.sampling_params
        turn = "" if self.after is None else f", after request {self.after}"
        leaves = "" if self.patience_s is None else f", leaves after {self.patience_s:.2f} s"
        how = "of engines directly" if self.is_direct else "of the router"
        size = f"{len(self.request.token_ids)} tokens, n={params.n}, max_tokens={params.max_tokens}"
        return f"{size}, {how}{turn}{leaves}"


def draw_asks(
    rng: random.Random, window: int, eos_token_ids: frozenset[int], draw_time_s: Callable[[], float]
) -> list[Ask]:
    """A few clients whose prompts share beginnings, and conversations among them."""
    stems = [draw_tokens(rng, rng.randrange(1, window // 2)) for _ in range(3)]
    asks: list[Ask] = []
    for number in range(rng.randrange(4, 15)):
        after = rng.choice(asks) if asks and rng.random() < 0.3 else None
        prompt = next_turn(after.request, window, eos_token_ids) if after is not None else rng.choice(stems)
        prompt = prompt[: rng.randrange(1, len(prompt) + 1)] if rng.random() < 0.2 else prompt
        prompt = [*prompt, *draw_tokens(rng, rng.randrange(6))][: window - 1]
        salt = after.request.cache_salt if after is not None else rng.choice(SALTS)
        request = draw_request(rng, number, prompt, window, salt)
        patience_s = rng.expovariate(rng.choice((1.0, 10.0, 30.0))) if rng.random() < 0.25 else None
        is_direct = rng.random() < 0.25
        if is_direct:
            request = as_direct(request, number)
        asks.append(
            Ask(
                number,
                request,
                draw_time_s(),
                patience_s,
                None if after is None else after.number,
                is_direct,
            )
        )
    return asks


def draw_request(rng: random.Random, number: int, prompt: list[int], window: int, salt: str | None) -> GenerateRequest:
    room = window - len(prompt)
    max_tokens = rng.choice((None, 1, 2, *[rng.randrange(1, room + 1)] * 4))
    if max_tokens is not None:
        max_tokens = min(max_tokens, room)
    params = SamplingParams(
        n=rng.choice((1, 1, 1, 2, 3)),
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, 0, 3)) if (max_tokens or room) >= 3 else 0,
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.randrange(2**31),
        stop_token_ids=draw_tokens(rng, rng.choice((0, 0, 2))),
        ignore_eos=rng.random() < 0.3,
    )
    # Ids collide now and then: they are the clients' and mean nothing.
    name = rng.choice(("same", f"r{number}", f"r{number}", f"r{number}"))
    return GenerateRequest(request_id=name, token_ids=prompt, sampling_params=params, cache_salt=salt)


def draw_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS) for _ in range(count)]


def next_turn(request: GenerateRequest, window: int, eos_token_ids: frozenset[int]) -> list[int]:
    """The beginning of a prompt that goes on after a request's first choice."""
    return [*request.token_ids, *right_answers(request, window, eos_token_ids)[0].token_ids]


def right_answers(request: GenerateRequest, window: int, eos_token_ids: frozenset[int]) -> list[Answer]:
    """What a single engine that never fails would answer, choice by choice."""
    params = request.sampling_params
    assert params.seed is not None and max(request.token_ids) < VOCAB_SIZE
    room = window - len(request.token_ids)
    limit = min(room, params.max_tokens or room)
    answers = []
    for index in range(params.n):
        seed = choice_seed(params.seed, index) if params.temperature > 0 else 0
        answers.append(cut_off(toy_output(request.token_ids, limit, seed), params, eos_token_ids))
    return answers


def cut_off(tokens: list[int], params: SamplingParams, eos_token_ids: frozenset[int]) -> Answer:
    """The output up to its first EOS or stop token that counts."""
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_token_ids)
    for count, token in enumerate(tokens, start=1):
        if token in ends and count >= params.min_tokens:
            return Answer(tokens[:count], "stop")
    return Answer(tokens, "length")


def as_direct(request: GenerateRequest, number: int) -> GenerateRequest:
    """A request as a client without a router sends it: one choice, under a name of its own."""
    params = msgspec.structs.replace(request.sampling_params, n=1)
    return msgspec.structs.replace(request, request_id=f"direct{number}", sampling_params=params)


def draw_last_asks(rng: random.Random, window: int, count: int) -> list[Ask]:
    """Plain requests of some length, to see that all is well again."""
    asks = []
    for number in range(count):
        params = SamplingParams(max_tokens=3, temperature=0.0, seed=number, ignore_eos=True)
        prompt = draw_tokens(rng, rng.randrange(1, window - 2))
        request = GenerateRequest(request_id=f"last{number}", token_ids=prompt, sampling_params=params)
        asks.append(Ask(100 + number, request, 0.0, None, None))
    return asks
