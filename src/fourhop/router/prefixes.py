"""Which engine is known to have the KV of which beginnings: an index by a hash chain over pages of tokens.

A page is a few blocks: large enough that one lookup a page is cheap, small enough that less than one is never worth
a transfer. What the index says is a hint. It may be out of date, and an engine that is asked compares the tokens
themselves, so a wrong entry costs time and nothing else. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from fourhop.wire.prompt import TOKEN_BYTES, packed

Page = int
"""A hash of a page and all pages before it, 64 bits, good in this process alone. Two that collide are a wrong hint."""


class Holder(NamedTuple):
    """An engine in one of its lives: what it had is gone when it starts anew."""

    engine: str
    epoch: str


class Relation(StrEnum):
    """How a prompt relates to what is held of it. A label of a metric."""

    NONE = "none"  # nobody is known to have its beginning
    EXTENDS = "extends"  # it goes on after all that is held
    DIVERGED = "diverged"  # it leaves the held tokens: another turn, or a template that rewrote the last one


class Match(msgspec.Struct, frozen=True):
    """The longest known beginning of a prompt: `num_pages` at `holder`."""

    holder: Holder | None
    num_pages: int
    relation: Relation


NO_MATCH = Match(None, 0, Relation.NONE)


def page_tokens(block_size: int, at_least: int) -> int:
    """Tokens of a page: whole blocks, about `at_least` of them, one block if that is more."""
    return block_size * max(1, at_least // block_size)


def pages_of(token_ids: list[int], num_page_tokens: int, salt: str) -> list[Page]:
    """The chain of a sequence's whole pages: each hash stands for all tokens from the first one on, and the salt."""
    pages: list[Page] = []
    extend_pages(pages, token_ids, num_page_tokens, salt)
    return pages


def extend_pages(pages: list[Page], token_ids: list[int], num_page_tokens: int, salt: str) -> None:
    """Add the pages that `token_ids` has beyond those that are there already."""
    rest = token_ids[len(pages) * num_page_tokens :] if pages else token_ids
    pages += chain(pages[-1] if pages else hash(salt), rest, num_page_tokens)


def chain(parent: Page, token_ids: Sequence[int], num_page_tokens: int) -> Iterator[Page]:
    """The whole pages of these tokens, which follow `parent`."""
    raw = packed(token_ids)
    size = num_page_tokens * TOKEN_BYTES
    for start in range(0, len(raw) - size + 1, size):
        parent = hash((parent, raw[start : start + size]))
        yield parent


class _Entry(msgspec.Struct, gc=False):
    """Who has this beginning, and whether a longer one was ever seen to follow it. There may be a million of these: the
    garbage collector has none of them to look at, and they hold nothing that refers back.
    """

    holders: tuple[Holder, ...] = ()
    goes_on: bool = False

    def add(self, holder: Holder) -> bool:
        """True if it was there."""
        if holder in self.holders:
            return True
        self.remove(holder.engine)
        self.holders = (*self.holders, holder)
        return False

    def remove(self, engine: str) -> bool:
        """True if the engine was among the holders."""
        num_before = len(self.holders)
        self.holders = tuple(holder for holder in self.holders if holder.engine != engine)
        return len(self.holders) < num_before


class Prefixes:
    """At most `max_pages` beginnings, the longest unused one forgotten first."""

    def __init__(self, max_pages: int) -> None:
        self._max_pages = max_pages
        self._entries: OrderedDict[Page, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def record(self, pages: Sequence[Page], holder: Holder) -> None:
        """`holder` has the KV of every one of these pages."""
        entries, only_this, goes_on, is_known = self._entries, (holder,), False, False
        for page in reversed(pages):  # the beginning last, so that it outlives what follows it
            entry = entries.get(page)
            if entry is None:
                entries[page] = _Entry(only_this, goes_on)
            else:
                entries.move_to_end(page)
                is_known = is_known or entry.add(holder)  # who has a page has those before it
                entry.goes_on = entry.goes_on or goes_on
            goes_on = True
        while len(self._entries) > self._max_pages:
            self._entries.popitem(last=False)

    def longest(self, pages: Sequence[Page], is_good: Callable[[Holder], bool]) -> Match:
        """The most pages that a good holder has. Of several holders the first by name."""
        for num_pages in range(len(pages), 0, -1):
            entry = self._entries.get(pages[num_pages - 1])
            if entry is None:
                continue
            good = [holder for holder in sorted(entry.holders) if is_good(holder)]
            if good:
                leaves = entry.goes_on and num_pages < len(pages)
                return Match(good[0], num_pages, Relation.DIVERGED if leaves else Relation.EXTENDS)
        return NO_MATCH

    def held(self, pages: Sequence[Page]) -> dict[Holder, int]:
        """How many of these pages each holder is known to have.

        Most pages have the holders of the page after them: a beginning that all of a thousand engines have is gone
        through once, not once for each page.
        """
        held: dict[Holder, int] = {}
        last: tuple[Holder, ...] = ()
        for num_pages in range(len(pages), 0, -1):
            entry = self._entries.get(pages[num_pages - 1])
            if entry is not None and entry.holders != last:
                last = entry.holders
                for holder in last:
                    held.setdefault(holder, num_pages)
        return held

    def num_known(self, pages: Sequence[Page], holder: Holder) -> int:
        """How many of these pages `holder` is known to have."""
        for num_pages in range(len(pages), 0, -1):
            entry = self._entries.get(pages[num_pages - 1])
            if entry is not None and holder in entry.holders:
                return num_pages
        return 0

    def forget_engine(self, engine: str) -> None:
        """An engine is gone, in all its lives."""
        for page in [page for page, entry in self._entries.items() if entry.remove(engine)]:
            if not self._entries[page].holders:
                del self._entries[page]

    def forget(self, pages: Sequence[Page], holder: Holder) -> None:
        """`holder` turned out not to have these pages any more."""
        for page in pages:
            entry = self._entries.get(page)
            if entry is not None and holder in entry.holders:
                entry.remove(holder.engine)
                if not entry.holders:
                    del self._entries[page]
