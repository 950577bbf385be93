"""The measuring of hand-overs, on engines with the toy model: what it counts is what they did."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine

import pytest

from fakes.toy_fleet import toy_fleet
from fourhop.bench.handovers import (
    HOLD,
    Turn,
    converse,
    greedy,
    hear,
    median_turns,
    random_prompt,
    time_overlap,
    time_serial,
)
from fourhop.wire.errors import StartError

DRAW = random.Random(5)
VOCAB_SIZE = 50


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


def test_both_ways_of_a_hand_over_pull_the_prompt() -> None:
    async def scenario() -> None:
        async with toy_fleet() as fleet:
            prefill, decode = fleet.prefill[0].engine, fleet.decode[0].engine
            serial_s = await time_serial(prefill, decode, random_prompt(DRAW, 21, VOCAB_SIZE))
            overlap_s = await time_overlap(fleet.router, random_prompt(DRAW, 21, VOCAB_SIZE))
            assert serial_s > 0 and overlap_s > 0
            assert decode.loop.jobs.counters.transfers == 2
            await fleet.settle()

    run(scenario())


def test_a_hand_over_that_did_not_happen_is_no_figure() -> None:
    async def scenario() -> None:
        async with toy_fleet() as fleet:
            prompt = random_prompt(DRAW, 9, VOCAB_SIZE)
            with pytest.raises(StartError, match="no KV was pulled"):
                await time_overlap(fleet.decode[0].engine, prompt)
            await fleet.settle()

    run(scenario())


def test_a_conversation_computes_what_is_new() -> None:
    async def scenario() -> None:
        async with toy_fleet() as fleet:
            turns = await converse(fleet.router, DRAW, 3, 12, VOCAB_SIZE)
            assert [turn.num_prompt for turn in turns] == [12, 40, 68]
            assert turns[0].num_computed == 12
            # Blocks of 4; the last answered token has no KV, and its block is computed with what is new.
            assert all(12 <= turn.num_computed <= 12 + 4 for turn in turns[1:])
            await fleet.settle()

    run(scenario())


def test_medians_are_taken_turn_by_turn() -> None:
    first, second, third = [[Turn(ttft_s, 10, computed)] for ttft_s, computed in ((1.0, 5), (2.0, 6), (9.0, 7))]
    assert median_turns([first, second, third]) == [Turn(2.0, 10, 6)]


def test_hearing_keeps_what_is_needed() -> None:
    async def scenario() -> None:
        async with toy_fleet() as fleet:
            prompt = random_prompt(DRAW, 9, VOCAB_SIZE)
            heard = await hear(fleet.prefill[0].engine, greedy(prompt, 1, transfer=HOLD))
            assert len(heard.token_ids) == 1 and heard.ticket is not None and heard.first_s >= heard.sent_s
            await fleet.prefill[0].engine.abort([heard.ticket["ticket_id"]])
            await fleet.settle()

    run(scenario())
