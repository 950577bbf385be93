"""Placement as a pure choice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fourhop.router.policy import Candidate, Reason, least_loaded, place, place_rest

candidates = st.lists(
    st.builds(
        Candidate,
        name=st.uuids().map(str),
        role=st.sampled_from(["prefill", "decode"]),
        load=st.integers(0, 9),
        num_placed=st.integers(0, 9),
        exchange=st.sampled_from([None, "a", "b"]),
    ),
    max_size=6,
)


def test_least_load_then_least_placed_then_name() -> None:
    a = Candidate("a", "decode", load=2, num_placed=1)
    b = Candidate("b", "decode", load=1, num_placed=9)
    c = Candidate("c", "decode", load=1, num_placed=3)
    d = Candidate("d", "decode", load=1, num_placed=3)
    assert least_loaded([a, b, d, c]) is c
    assert least_loaded([]) is None


@given(candidates, st.booleans(), st.sampled_from([None, 1, 5]))
def test_a_place_is_found_whenever_something_is_alive(
    alive: list[Candidate], wants_split: bool, max_tokens: int | None
) -> None:
    placement = place(alive, wants_split=wants_split, max_tokens=max_tokens)
    assert (placement is None) == (not alive)
    if placement is None:
        return
    assert placement == place(alive[::-1], wants_split=wants_split, max_tokens=max_tokens)
    chosen = next(one for one in alive if one.name == placement.engine)
    if placement.is_split:
        assert chosen.role == "prefill" and wants_split and max_tokens != 1
        rest = place_rest(alive, chosen.exchange)
        assert rest is not None and rest.role == "decode" and rest.exchange == chosen.exchange is not None


@given(candidates, st.sampled_from([None, "a", "b"]))
def test_the_rest_goes_to_a_decode_engine_if_there_is_one(alive: list[Candidate], exchange: str | None) -> None:
    rest = place_rest(alive, exchange)
    assert (rest is None) == (not alive)
    if rest is not None and any(one.role == "decode" for one in alive):
        assert rest.role == "decode"


def test_reasons() -> None:
    prefill = Candidate("p", "prefill", 0, exchange="a")
    decode = Candidate("d", "decode", 0, exchange="a")
    other = Candidate("o", "decode", 0, exchange="b")

    def reason(*alive: Candidate, wants_split: bool = True, max_tokens: int | None = 9) -> Reason | None:
        placement = place(alive, wants_split=wants_split, max_tokens=max_tokens)
        return None if placement is None else placement.reason

    assert reason(prefill, decode) is Reason.SPLIT
    assert reason(prefill, decode, max_tokens=1) is Reason.ONE_TOKEN
    assert reason(prefill, decode, wants_split=False) is Reason.CONTINUED
    assert reason(prefill, other) is Reason.NO_PAIR
    assert reason(prefill) is Reason.NO_DECODE
    assert reason(decode) is Reason.NO_PREFILL
    assert reason() is None
