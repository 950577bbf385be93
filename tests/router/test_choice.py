"""Local or split, by what is predicted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourhop.router.choice import Aim, Option, Prospect, aim_of, chance, choose, whole_on
from fourhop.router.policy import Reason

AIM = Aim(ttft_s=4.0, itl_s=0.05, num_output=64)


def engine(name: str, exchange: str = "a", **told: float) -> Prospect:
    """An engine that takes a second for the prompt and 20 ms for a step, with what is told instead."""
    one = Prospect(name, exchange, prefill_s=1.0, step_s=0.02, now_step_s=0.02, num_new_tokens=500)
    for field, value in ({"num_kept": told.get("num_paused", 0)} | told).items():
        setattr(one, field, value)
    return one


def busy_engine(name: str, exchange: str = "a", **told: float) -> Prospect:
    """A prefill engine to which prompts come all the time."""
    return engine(name, exchange, pause_rate=0.5, pause_s=3.0, **told)


def decide(prefill: Prospect, decode: Prospect, aim: Aim = AIM) -> tuple[Option, Reason]:
    return choose([prefill], [decode], aim)


def test_a_long_prompt_is_split_where_streams_would_wait_for_it() -> None:
    option, reason = decide(busy_engine("p"), engine("d", num_paused=4, num_streams=4, handover_s=0.03))
    assert reason is Reason.SPLIT
    assert (option.engine, option.decode) == ("p", "d")
    assert option.ttft_s == 1.0


def test_a_decode_engine_without_streams_takes_it_whole_and_saves_the_hand_over() -> None:
    option, reason = decide(engine("p"), engine("d", handover_s=0.03))
    assert reason is Reason.DECODE_IDLE
    assert (option.engine, option.is_split) == ("d", False)


def test_a_queue_for_prefill_is_gone_round_when_nobody_waits_for_it() -> None:
    assert decide(engine("p", wait_s=2.0), engine("d", handover_s=0.03))[1] is Reason.PREFILL_BUSY


def test_a_short_prompt_disturbs_nobody() -> None:
    short: dict[str, Any] = {"prefill_s": 0.03, "num_new_tokens": 10}
    prefill = engine("p", wait_s=0.5, **short)
    assert decide(prefill, engine("d", num_paused=2, num_streams=2, **short))[1] is Reason.SHORT_PROMPT


def test_what_is_cached_at_a_decode_engine_is_computed_there() -> None:
    cached = engine("d", num_paused=2, num_streams=2, prefill_s=0.06, num_new_tokens=20)
    assert decide(busy_engine("p", wait_s=1.0), cached)[1] is Reason.PREFIX_HIT


def test_pauses_beyond_what_is_allowed_are_not_made_without_need() -> None:
    prefill, decode = busy_engine("p", wait_s=1.0), engine("d", num_paused=1, num_streams=1)
    generous = Aim(ttft_s=4.0, itl_s=0.5, num_output=64)
    assert decide(prefill, decode, generous)[1] is Reason.SPLIT
    decode.credit = 1.0
    prefill.wait_s = 3.5
    assert decide(prefill, decode, generous)[1] is Reason.PREFILL_BUSY


def test_a_target_that_would_be_missed_is_worth_a_pause() -> None:
    prefill, decode = busy_engine("p", wait_s=9.0), engine("d", num_paused=1, num_streams=1)
    generous = Aim(ttft_s=4.0, itl_s=0.5, num_output=64)
    assert decide(prefill, decode, generous)[1] is Reason.PREFILL_BUSY


def test_a_full_decode_engine_leaves_the_request_where_its_prompt_is() -> None:
    full = engine("d", num_streams=30, num_paused=30, step_s=0.06, now_step_s=0.055)
    option, reason = decide(engine("p"), full)
    assert reason is Reason.DECODE_BUSY
    assert option.engine == "p"


def test_streams_of_a_prefill_engine_are_to_wait_for_the_prompts_that_come() -> None:
    full = engine("d", num_streams=30, num_paused=30, step_s=0.04, now_step_s=0.039)
    assert decide(busy_engine("p"), full)[1] is Reason.SPLIT
    assert decide(engine("p", pause_rate=0.5, pause_s=0.001), full)[1] is Reason.DECODE_BUSY


def test_only_a_pair_that_can_hand_over_is_split_over() -> None:
    others = [busy_engine("p1", exchange="x"), busy_engine("p2", wait_s=1.0)]
    decode = [engine("d1", num_paused=9, num_streams=9), engine("d2", exchange="y", num_paused=9, num_streams=9)]
    option, reason = choose(others, decode, AIM)
    assert reason is Reason.SPLIT
    assert (option.engine, option.decode) == ("p2", "d1")


def test_targets_that_are_not_given_are_multiples_of_an_idle_engine() -> None:
    assert aim_of(0.0, 0.0, idle_prefill_s=1.0, idle_step_s=0.02, num_output=0) == Aim(4.0, 0.04, 1.0)
    assert aim_of(9.0, 0.3, idle_prefill_s=1.0, idle_step_s=0.02, num_output=5) == Aim(9.0, 0.3, 5)


numbers = st.floats(0, 100)
prospects = st.builds(
    Prospect,
    name=st.uuids().map(str),
    exchange=st.just("a"),
    wait_s=numbers,
    prefill_s=numbers,
    handover_s=numbers,
    step_s=numbers,
    now_step_s=st.just(0.0),
    pause_rate=numbers,
    pause_s=numbers,
    num_paused=st.integers(0, 9),
    num_kept=st.integers(0, 9),
    num_streams=st.integers(0, 9),
    num_new_tokens=st.integers(1, 9),
    credit=st.floats(-9, 9),
)


@settings(max_examples=30)
@given(st.lists(prospects, min_size=1, max_size=3), st.lists(prospects, min_size=1, max_size=3), st.integers(1, 500))
def test_some_engine_is_always_chosen_whatever_their_order(
    prefill: list[Prospect], decode: list[Prospect], num_output: int
) -> None:
    aim = Aim(4.0, 0.05, num_output)
    option, reason = choose(prefill, decode, aim)
    assert option == choose(prefill[::-1], decode[::-1], aim)[0]
    assert option.engine in {one.name for one in prefill + decode}
    assert option.is_split == (reason is Reason.SPLIT)
    assert option.num_missed >= 0.0


def test_a_stream_beside_prompts_that_fill_the_engine_is_lost_even_if_few_would_come_in_its_own_time() -> None:
    """Prompts that come while it waits for others make it wait too."""
    generous = Aim(ttft_s=4.0, itl_s=0.1, num_output=64)  # two pauses of two seconds are allowed
    quiet, full = (whole_on(engine("p", pause_rate=rate, pause_s=2.0), generous) for rate in (0.05, 0.45))
    assert quiet.num_missed < 0.1
    assert full.num_missed > 0.5
    assert full.itl_s == pytest.approx(10 * 0.02)


@pytest.mark.parametrize(
    ("mean", "spread", "expected"), [(1.0, 0.0, 1.0), (1.1, 0.0, 0.0), (1.0, 0.1, 0.5), (0.9, 0.1, 0.841)]
)
def test_chance(mean: float, spread: float, expected: float) -> None:
    assert chance(1.0, mean, spread) == pytest.approx(expected, abs=1e-3)
