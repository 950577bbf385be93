"""What a hand-over between two running engines takes, and what a later turn of a conversation costs.

Prompts are random token ids, so no two share a block. Times are this process's clock: each engine tells its moments in
seconds after it received the request, and the time at which that was sent is added.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from fourhop.tokens.client import RemoteTokenServer
from fourhop.tokens.connection import Session
from fourhop.tokens.server import TokenServer
from fourhop.tokens.worker import RemoteWorker
from fourhop.wire.errors import StartError
from fourhop.wire.generate import GenerateRequest, SamplingParams
from fourhop.wire.moments import Moment

HOLD = {"do_remote_decode": True}
NUM_DECODED = 4
NUM_ANSWERED = 16
NUM_TURNS = 5
NUM_NEW = 500
SERIAL_TOKENS = 2000
OVERLAP_TOKENS = (500, 1000, 2000, 4000)


@dataclass
class Heard:
    """What came of one request. `moments` are on this process's clock, in seconds."""

    sent_s: float
    first_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    ticket: dict[str, Any] | None = None
    moments: dict[str, float] = field(default_factory=dict)
    num_cached: int = 0


async def hear(server: TokenServer, request: GenerateRequest) -> Heard:
    """Run one request to its end."""
    heard = Heard(time.monotonic())
    async with aclosing(server.generate(request)) as chunks:
        async for chunk in chunks:
            for choice in chunk.choices:
                heard.first_s = heard.first_s or time.monotonic()
                heard.token_ids += choice.token_ids
            heard.ticket = chunk.kv_transfer_params or heard.ticket
            heard.moments |= {name: heard.sent_s + after_s for name, after_s in (chunk.moments or {}).items()}
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                heard.num_cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
    return heard


def random_prompt(draw: random.Random, num_tokens: int, vocab_size: int) -> list[int]:
    return [draw.randrange(vocab_size) for _ in range(num_tokens)]


@dataclass(frozen=True)
class Handovers:
    """Medians of one pair of engines. Times in seconds, by prompt length where there are several."""

    serial_s: float
    overlap_s: dict[int, float]
    turns: list[Turn]


async def measure_pair(router: str, prefill: str, decode: str, session: Session, num_rounds: int) -> Handovers:
    """Hand-overs and conversations at a router with these two engines, each once to warm up and `num_rounds` times."""
    front, first, second = [RemoteTokenServer(url, session) for url in (router, prefill, decode)]
    info = await RemoteWorker(decode, session).check()
    if info is None:
        raise StartError(f"{decode} is not a fourhop engine")
    draw, vocab = random.Random(num_rounds), info.vocab_size
    serial: list[float] = []
    overlap: dict[int, list[float]] = {length: [] for length in OVERLAP_TOKENS}
    conversations: list[list[Turn]] = []
    for _ in range(1 + num_rounds):
        serial.append(await time_serial(first, second, random_prompt(draw, SERIAL_TOKENS, vocab)))
        for length, times in overlap.items():
            times.append(await time_overlap(front, random_prompt(draw, length, vocab)))
        conversations.append(await converse(front, draw, NUM_TURNS, NUM_NEW, vocab))
    return Handovers(
        median(serial[1:]),
        {length: median(times[1:]) for length, times in overlap.items()},
        median_turns(conversations[1:]),
    )


async def time_serial(prefill: TokenServer, decode: TokenServer, prompt: list[int]) -> float:
    """Seconds from prefill's last step to decode's first, decode being asked when prefill has answered."""
    first = await hear(prefill, greedy(prompt, 1, transfer=HOLD))
    if first.ticket is None:
        raise StartError("the prefill engine gave no ticket: it needs a KV connector")
    rest = await hear(decode, greedy(prompt, NUM_DECODED, transfer=first.ticket, output=first.token_ids))
    return _between(first.moments, rest.moments)


async def time_overlap(router: TokenServer, prompt: list[int]) -> float:
    """The same where a router reserves decode before prefill starts."""
    moments = (await hear(router, greedy(prompt, NUM_DECODED))).moments
    return _between(moments, moments)


def _between(prefill: dict[str, float], decode: dict[str, float]) -> float:
    if Moment.PREFILL_DONE not in prefill or Moment.KV_READY not in decode:
        raise StartError("no KV was pulled: the request was not split, or decode computed the prompt anew")
    return decode[Moment.KV_READY] - prefill[Moment.PREFILL_DONE]


@dataclass(frozen=True)
class Turn:
    """`num_computed` tokens of the prompt were neither cached nor pulled."""

    ttft_s: float
    num_prompt: int
    num_computed: int


async def converse(router: TokenServer, draw: random.Random, num_turns: int, num_new: int, vocab: int) -> list[Turn]:
    """A conversation whose every turn adds `num_new` tokens to all that was said."""
    said: list[int] = []
    turns: list[Turn] = []
    for _ in range(num_turns):
        said += random_prompt(draw, num_new, vocab)
        heard = await hear(router, greedy(said, NUM_ANSWERED))
        turns.append(Turn(heard.first_s - heard.sent_s, len(said), len(said) - heard.num_cached))
        said += heard.token_ids
    return turns


def median_turns(conversations: Iterable[list[Turn]]) -> list[Turn]:
    """Turn by turn, the medians over conversations."""
    return [
        Turn(
            median(turn.ttft_s for turn in turns),
            turns[0].num_prompt,
            round(median(turn.num_computed for turn in turns)),
        )
        for turns in zip(*conversations, strict=True)
    ]


def greedy(
    prompt: list[int], num_tokens: int, *, transfer: dict[str, Any] | None = None, output: list[int] | None = None
) -> GenerateRequest:
    """Exactly `num_tokens` tokens after the prompt."""
    return GenerateRequest(
        token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=0),
        output_token_ids=output or [],
        kv_transfer_params=transfer,
        stream=True,
    )
