"""Which engine has the KV of which blocks, as their cache events tell. Pure: no I/O, no clock.

An engine's own hashes mean nothing here: a block is known by a chain over its tokens, found through the parent that its
event names. So engines of different kinds, seeds and hash functions can be compared, and a prompt is looked up by
tokens alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from fourhop.router import prefixes
from fourhop.router.prefixes import Page
from fourhop.wire.events import BlockHash, BlockRemoved, BlockStored, Event

Link = Page
"""A page of one block."""

ROOT: Link = hash("")


def chain(token_ids: Sequence[int], block_size: int) -> list[Link]:
    """The links of a prompt's full blocks."""
    return list(prefixes.chain(ROOT, token_ids, block_size))


@dataclass
class Cache:
    """One engine's: its blocks by its own hashes."""

    block_size: int = 0
    link_of: dict[BlockHash, Link] = field(default_factory=dict)


class CacheIndex:
    """The caches of all engines that tell of theirs."""

    def __init__(self) -> None:
        self.sizes: set[int] = set()  # tokens of a block, of all that were told of
        self._caches: dict[str, Cache] = {}
        self._holders: dict[Link, dict[str, int]] = {}  # how many blocks of each engine are this one

    def __contains__(self, engine: str) -> bool:
        return engine in self._caches

    def __len__(self) -> int:
        """Blocks that are known of."""
        return sum(len(cache.link_of) for cache in self._caches.values())

    def clear(self, engine: str) -> None:
        """Nothing is known of an engine's cache, but that it tells of it."""
        self.forget(engine)
        self._caches[engine] = Cache()

    def forget(self, engine: str) -> None:
        """An engine does not tell of its cache any more."""
        cache = self._caches.pop(engine, Cache())
        for link in set(cache.link_of.values()):
            self._holders[link].pop(engine)
            self._drop_empty(link)

    def apply(self, engine: str, events: Sequence[Event]) -> None:
        """What changed at an engine, in order."""
        cache = self._caches.setdefault(engine, Cache())
        for event in events:
            if isinstance(event, BlockStored):
                self._store(engine, cache, event)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    self._remove(engine, cache, name)
            else:
                self.clear(engine)
                cache = self._caches[engine]

    def block_size(self, engine: str) -> int:
        """Tokens of a block there; 0 until a block was told of."""
        cache = self._caches.get(engine)
        return 0 if cache is None else cache.block_size

    def num_blocks(self, engine: str, links: Sequence[Link]) -> int:
        """How many of a prompt's first blocks an engine has; `links` are of its block size.

        Engines give up the end of a prompt before its beginning, so that the last block they have is found by halves.
        """
        return bisect_left(links, True, key=lambda link: engine not in self._holders.get(link, ()))

    def holders(self, links: Sequence[Link]) -> tuple[list[str], int]:
        """Who has most of a prompt's first blocks, by name, and how many those are."""
        known = next((number for number, link in enumerate(links) if link not in self._holders), len(links))
        return (sorted(self._holders[links[known - 1]]), known) if known else ([], 0)

    def _store(self, engine: str, cache: Cache, event: BlockStored) -> None:
        """Blocks with keys beside their tokens, as salted ones, are nobody else's; of an unknown parent they are no
        use."""
        if event.extra_keys and any(event.extra_keys):
            return
        parent = ROOT if event.parent_block_hash is None else cache.link_of.get(event.parent_block_hash)
        if parent is None or event.block_size < 1 or len(event.token_ids) != event.block_size * len(event.block_hashes):
            return
        cache.block_size = event.block_size
        self.sizes.add(event.block_size)
        links = prefixes.chain(parent, event.token_ids, event.block_size)
        for name, link in zip(event.block_hashes, links, strict=True):
            if name not in cache.link_of:
                cache.link_of[name] = link
                counts = self._holders.setdefault(link, {})
                counts[engine] = counts.get(engine, 0) + 1

    def _remove(self, engine: str, cache: Cache, name: BlockHash) -> None:
        link = cache.link_of.pop(name, None)
        if link is None:
            return
        counts = self._holders[link]
        counts[engine] -= 1
        if not counts[engine]:
            del counts[engine]
            self._drop_empty(link)

    def _drop_empty(self, link: Link) -> None:
        if not self._holders[link]:
            del self._holders[link]
