"""Engines in the order of what they do."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fourhop.router.ranks import SHORT, Kind, Ranks

KINDS: list[Kind] = [("prefill", "a"), ("decode", "a"), ("decode", None)]
moves = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(KINDS), st.integers(0, 5), st.integers(0, 5)), max_size=40
)


@settings(max_examples=50)
@given(moves, st.frozensets(st.integers(0, 9)))
def test_the_least_of_each_kind_are_those_of_a_sort(
    told: list[tuple[int, Kind, int, int]], down: frozenset[int]
) -> None:
    ranks, known = Ranks(), dict[str, tuple[Kind, int, int]]()
    for number, kind, load, num_placed in told:
        ranks.put(str(number), kind, load, num_placed)
        known[str(number)] = kind, load, num_placed
    expected = []
    for kind in KINDS:
        entries = sorted((load, placed, name) for name, (one, load, placed) in known.items() if one == kind)
        expected += [name for _, _, name in entries if int(name) not in down][:SHORT]
    assert sorted(ranks.least(lambda name: int(name) not in down)) == sorted(expected)
