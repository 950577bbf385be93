"""What engines tell of their prefix caches, and what that says of a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fourhop.router.cacheindex import CacheIndex, chain
from fourhop.router.config import RouterConfig
from fourhop.router.run import Run
from fourhop.router.worker import Worker
from fourhop.service.fallbacks import Fallbacks

if TYPE_CHECKING:
    from fourhop.router.subscriber import Subscriptions


class Caches:
    """Follows the engines that publish cache events: ours say where, a vLLM's address is configured.

    `unheard` are those that tell and cannot be heard.
    """

    def __init__(self, config: RouterConfig, fallbacks: Fallbacks) -> None:
        self.index = CacheIndex()
        self.unheard: set[str] = set()
        self._fallbacks = fallbacks
        self._config = config
        self._subscriptions: Subscriptions | None = None

    def follow(self, worker: Worker) -> None:
        """The engine came up, perhaps anew."""
        self.unheard.discard(worker.name)
        address = self._config.kv_events.get(worker.name)
        endpoint, replay = ("", "") if address is None else (address.endpoint, address.replay_endpoint)
        if worker.info is not None and not endpoint:
            endpoint, replay = worker.info.kv_events_endpoint, worker.info.kv_replay_endpoint
        if not endpoint:
            self.leave(worker.name)
            return
        endpoint, replay = reachable(endpoint, worker.name), reachable(replay, worker.name)
        if self._subscriptions is None:
            try:
                from fourhop.router.subscriber import Subscriptions
            except ModuleNotFoundError as error:
                self._lost(worker.name, "unheard", f"{error.name} is needed: fourhop[events]")
                return
            self._subscriptions = Subscriptions(self.index, self._lost)
        self._subscriptions.follow(worker.name, endpoint, replay)

    def leave(self, engine: str) -> None:
        """What an earlier life of the engine told is not true any more."""
        self.unheard.discard(engine)
        if self._subscriptions is not None:
            self._subscriptions.leave(engine)

    def _lost(self, engine: str, cause: str, why: str) -> None:
        """Placement knows less of an engine's cache than it tells."""
        if cause == "unheard":
            self.unheard.add(engine)
        self._fallbacks.note(f"events_{cause}", f"{engine}: {why}")

    def num_cached(self, run: Run, worker: Worker) -> int | None:
        """How many tokens of the prompt's beginning an engine has; None if it does not tell, as of salted ones."""
        if worker.name not in self.index or run.request.cache_salt:
            return None
        size = self.index.block_size(worker.name)
        if size == 0:
            return 0
        return self.index.num_blocks(worker.name, self._links(run, size)) * size

    def tells(self, worker: Worker) -> bool:
        """True if the engine's own word is to be had."""
        return worker.name in self.index

    def holders(self, run: Run) -> tuple[list[str], int]:
        """Who has most of the prompt, and how many tokens that is."""
        best: tuple[list[str], int] = ([], 0)
        if run.request.cache_salt:
            return best
        for size in self.index.sizes:
            names, num_blocks = self.index.holders(self._links(run, size))
            best = max(best, (names, num_blocks * size), key=lambda found: found[1])
        return best

    async def close(self) -> None:
        if self._subscriptions is not None:
            await self._subscriptions.close()

    def _links(self, run: Run, block_size: int) -> list[int]:
        if run.num_link_tokens != block_size:
            run.num_link_tokens, run.links = block_size, chain(run.request.token_ids, block_size)
        return run.links


def reachable(address: str, url: str) -> str:
    """Where an engine listens, as seen from here: one that names every interface, or its own, is at its URL's host."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or host not in ("*", "0.0.0.0", "127.0.0.1", "localhost"):
        return address
    return f"tcp://{urlsplit(url).hostname or host}:{port}"
