"""The index of beginnings: it never claims a beginning that was not recorded, and finds the longest that was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourhop.router.prefixes import (
    NO_MATCH,
    Holder,
    Prefixes,
    Relation,
    extend_pages,
    page_tokens,
    pages_of,
)

D1, D2 = Holder("d1", "epoch-1"), Holder("d2", "epoch-1")
SIZE = 4

tokens = st.lists(st.integers(0, 2), max_size=24)
histories = st.lists(st.tuples(tokens, st.sampled_from([D1, D2]), st.sampled_from(["", "salt"])), max_size=12)


def everyone(holder: Holder) -> bool:
    return True


def chain(token_ids: list[int], salt: str = "") -> list[int]:
    return pages_of(token_ids, SIZE, salt)


def common_pages(one: list[int], other: list[int]) -> int:
    num_pages = 0
    while (end := (num_pages + 1) * SIZE) <= min(len(one), len(other)) and one[:end] == other[:end]:
        num_pages += 1
    return num_pages


@given(histories, tokens, st.sampled_from(["", "salt"]))
def test_the_longest_recorded_beginning_is_found_and_nothing_else(
    history: list[tuple[list[int], Holder, str]], prompt: list[int], salt: str
) -> None:
    index = Prefixes(10_000)
    for held, holder, held_salt in history:
        index.record(chain(held, held_salt), holder)
    match = index.longest(chain(prompt, salt), everyone)
    shared = [(common_pages(held, prompt), holder) for held, holder, held_salt in history if held_salt == salt]
    best = max((num_pages for num_pages, _ in shared), default=0)
    assert match.num_pages == best
    if best:
        assert match.holder in [holder for num_pages, holder in shared if num_pages == best]
    else:
        assert match == NO_MATCH
    for holder in (D1, D2):
        known = max((num_pages for num_pages, who in shared if who == holder), default=0)
        assert index.num_known(chain(prompt, salt), holder) == known


@given(tokens, tokens, st.sampled_from(["", "salt"]))
def test_a_chain_is_the_same_at_once_and_in_steps(first: list[int], rest: list[int], salt: str) -> None:
    grown = chain(first, salt)
    extend_pages(grown, first + rest, SIZE, salt)
    assert grown == chain(first + rest, salt)
    assert len(grown) == (len(first) + len(rest)) // SIZE


@given(histories, st.integers(0, 6))
def test_it_never_grows_beyond_its_bound(history: list[tuple[list[int], Holder, str]], bound: int) -> None:
    index = Prefixes(bound)
    for held, holder, salt in history:
        index.record(chain(held, salt), holder)
        assert len(index) <= bound


def test_the_end_of_the_oldest_is_forgotten_first() -> None:
    index = Prefixes(4)
    old, new = chain([1] * 12), chain([2] * 8)
    index.record(old, D1)
    index.record(new, D1)
    assert index.num_known(new, D1) == 2
    assert index.num_known(old, D1) == 2


def test_a_prompt_extends_what_is_held_or_leaves_it() -> None:
    index = Prefixes(100)
    index.record(chain([1] * 4 + [2] * 8), D1)
    assert index.longest(chain([1] * 4 + [2] * 8 + [3] * 8), everyone).relation is Relation.EXTENDS
    assert index.longest(chain([1] * 4 + [2] * 8), everyone).relation is Relation.EXTENDS
    assert index.longest(chain([1] * 4), everyone).relation is Relation.EXTENDS
    assert index.longest(chain([1] * 4 + [3] * 8), everyone).relation is Relation.DIVERGED
    assert index.longest(chain([3] * 8), everyone).relation is Relation.NONE


def test_only_good_holders_count_and_what_is_gone_is_forgotten() -> None:
    index = Prefixes(100)
    pages = chain([1] * 12)
    index.record(pages, D1)
    index.record(pages[:1], D2)
    assert index.longest(pages, lambda holder: holder == D2).num_pages == 1
    assert index.longest(pages, lambda holder: False) == NO_MATCH
    restarted = Holder("d1", "epoch-2")
    assert index.num_known(pages, restarted) == 0
    index.forget(pages, restarted)
    assert index.num_known(pages, D1) == 3
    index.forget(pages[1:], D1)
    assert (index.num_known(pages, D1), index.num_known(pages, D2)) == (1, 1)
    index.forget(pages, D1)
    index.forget(pages, D2)
    assert len(index) == 0


def test_a_page_is_whole_blocks() -> None:
    assert [page_tokens(size, 64) for size in (1, 4, 16, 48, 64, 100)] == [64, 64, 64, 48, 64, 100]


def test_a_beginning_that_all_have_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand engines with one system prompt: a placement looks at each of them, not at each for every page."""
    index, pages = Prefixes(1000), chain(list(range(256)))
    holders = [Holder(f"e{number}", "1") for number in range(1000)]
    for holder in holders:
        index.record(pages, holder)
    longer = chain([*range(256), *range(64)])
    index.record(longer, holders[7])
    num_hashed = 0

    def counted(holder: Holder) -> int:
        nonlocal num_hashed
        num_hashed += 1
        return hash(holder.engine)

    monkeypatch.setattr(Holder, "__hash__", counted)
    assert index.held(longer) == dict.fromkeys(holders, len(pages)) | {holders[7]: len(longer)}
    assert num_hashed < 10 * len(holders)


def test_an_engine_in_a_new_life_is_found_beside_what_its_old_one_had() -> None:
    index, pages = Prefixes(1000), chain(list(range(40)))
    index.record(pages, D1)
    again = Holder(D1.engine, "epoch-2")
    index.record(pages[:5], again)
    assert index.held(pages) == {D1: 10, again: 5}
