from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourhop.frontend.phrases import Phrases
from fourhop.frontend.stops import HeldTail, StopMatcher


def matched(stops: list[str], pieces: list[str], *, include_stop: bool = False) -> tuple[str, str | None]:
    """The text that passed and the stop that was hit, with the state carried over between pieces."""
    held, text, hit = HeldTail(), "", None
    for piece in pieces:
        matcher = StopMatcher(Phrases(stops), held, include_stop=include_stop)
        text += matcher.feed(piece)
        if matcher.hit is not None:
            return text, matcher.hit
    matcher = StopMatcher(Phrases(stops), held, include_stop=include_stop)
    return text + matcher.flush(), hit


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "hit"),
    [
        (["\n"], ["k"], "k", None),
        (["<END>"], ["a<"], "a<", None),
        (["tre"], ["un, due, ", "tre", ", quattro"], "un, due, ", "tre"),
        (["tre"], ["un, t", "r", "e"], "un, ", "tre"),
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["abcd", "bc"], ["a", "b", "c", "d"], "a", "bc"),
        (["abcd", "bc"], ["abcd"], "a", "bc"),
        (["abc", "bc"], ["xabc"], "x", "abc"),
    ],
)
def test_text_up_to_the_first_stop(stops: list[str], pieces: list[str], text: str, hit: str | None) -> None:
    """Case 28."""
    assert matched(stops, pieces) == (text, hit)


def test_the_stop_is_kept_if_asked_for() -> None:
    assert matched(["tre"], ["due, tr", "e, quattro"], include_stop=True) == ("due, tre", "tre")


@pytest.mark.parametrize(
    ("text", "passed"), [("a<", "a"), ("a<E", "a"), ("a<x", "a<x"), ("a<<", "a<"), ("END>", "END>")]
)
def test_only_the_beginning_of_a_stop_is_held(text: str, passed: str) -> None:
    """Case 28 (ii): held by real overlap, not by the stop's length."""
    assert StopMatcher(Phrases(["<END>"]), HeldTail(), include_stop=False).feed(text) == passed


def test_nothing_passes_after_a_stop() -> None:
    """Case 28 (iv)."""
    matcher = StopMatcher(Phrases(["x"]), HeldTail(), include_stop=False)
    assert matcher.feed("axb") == "a"
    assert matcher.feed("b") + matcher.flush() == ""


@given(
    text=st.text("ab<", max_size=20),
    stops=st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3, unique=True),
    data=st.data(),
)
def test_pieces_do_not_matter(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    end, start, hit = min(ends, default=(len(text), len(text), None))
    assert matched(stops, pieces) == (text[:start], hit)
    assert matched(stops, pieces, include_stop=True) == (text[:end], hit)
