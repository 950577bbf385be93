"""Conversations: the KV of a turn's beginning goes back from the decode engine that has it to the prefill engine.

A conversation is known by its tokens alone: see `prefixes`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from fourhop.router.caches import Caches
from fourhop.router.config import RouterConfig
from fourhop.router.fleet import Fleet
from fourhop.router.handoff.fourhop import handle_of
from fourhop.router.ledger import HoldState, Ledger
from fourhop.router.metrics import RouterMetrics
from fourhop.router.prefixes import Holder, Match, Prefixes, extend_pages, page_tokens
from fourhop.router.release import Releaser
from fourhop.router.run import Run
from fourhop.router.worker import Worker
from fourhop.wire.errors import FourhopError
from fourhop.wire.moments import Moment
from fourhop.wire.ticket import KVTicket, parse_transfer_params
from fourhop.wire.worker import PrefixRequest

log = logging.getLogger(__name__)

STOCK_BLOCK_SIZE = 16
"""vLLM's default; one does not tell its own. A page is some blocks long, and what is known of it a hint."""


class Conversations:
    """Finds who has the beginning of a prompt, and remembers who has what.

    A ticket for a beginning is a help: without it, or with a wrong one, the prefill engine computes.
    """

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        ledger: Ledger,
        releaser: Releaser,
        metrics: RouterMetrics,
        wall_clock: Callable[[], float],
        new_id: Callable[[], str],
        caches: Caches,
    ) -> None:
        self._caches = caches
        self._config = config
        self._fleet = fleet
        self._ledger = ledger
        self._releaser = releaser
        self._metrics = metrics
        self._wall_clock = wall_clock
        self._new_id = new_id
        self._index = Prefixes(config.max_prefix_pages)

    async def find(self, run: Run, prefill: Worker) -> dict[str, Any] | None:
        """A ticket for the beginning of the prompt, if a decode engine has enough of it that `prefill` lacks."""
        self.leave(run)
        if prefill.info is None:
            return None
        self._extend(run, prefill)
        match = self._index.longest(run.pages, lambda holder: self._can_give(holder, prefill))
        self._metrics.prefix_matches[match.relation].inc()
        if match.holder is None:
            return None
        run.holder = match.holder.engine
        num_known = self._index.num_known(run.pages, Holder(prefill.name, prefill.epoch))
        if (match.num_pages - num_known) * run.num_page_tokens < self._config.kv_recompute_threshold:
            return None
        params, outcome = await self._ask(run, match, match.holder)
        if params is None:
            self._metrics.prefix_tickets[outcome].inc()
            self.leave(run)
        return params

    def _can_give(self, holder: Holder, prefill: Worker) -> bool:
        worker = self._fleet.workers.get(holder.engine)
        return (
            worker is not None
            and worker.role == "decode"
            and worker.is_usable
            and worker.epoch == holder.epoch
            and worker.exchange is not None
            and worker.exchange == prefill.exchange
        )

    async def _ask(self, run: Run, match: Match, holder: Holder) -> tuple[dict[str, Any] | None, str]:
        """The holder's ticket, or why there is none."""
        worker, now_s = self._fleet.workers[holder.engine], self._wall_clock()
        request = PrefixRequest(
            token_ids=run.request.token_ids, cache_salt=run.request.cache_salt, request_id=self._new_id()
        )
        run.prefix = self._ledger.ask(request.request_id, worker.name, holder.epoch, now_s)
        try:
            async with asyncio.timeout(self._config.prefix_timeout_s):
                params = await worker.control.hold_prefix(request)
            ticket = parse_transfer_params(params)
        except TimeoutError:
            self._metrics.fallbacks.note("prefix_timeout", f"{worker.name} was asked for a prefix")
            return None, "timeout"
        except FourhopError as error:
            self._metrics.fallbacks.note("prefix_failed", f"{worker.name} gave no prefix: {error.message}")
            return None, "failed"
        if not isinstance(ticket, KVTicket):
            self._ledger.end(run.prefix, HoldState.NEVER_HELD)
            self._index.forget(run.pages[: match.num_pages], holder)
            return None, "gone"
        self._ledger.issue(run.prefix, handle_of(ticket), now_s)
        run.prefix.is_taken = True
        run.num_prefix_tokens = ticket.num_tokens
        return params, "asked"

    def num_cached(self, run: Run, worker: Worker) -> int:
        """How many tokens of the prompt's beginning an engine has: by its word, else by what it was sent."""
        told = self._caches.num_cached(run, worker)
        if told is not None:
            return min(told, len(run.request.token_ids) - 1)
        self._extend(run, worker)
        num_known = self._index.num_known(run.pages, Holder(worker.name, worker.epoch))
        return min(num_known * run.num_page_tokens, len(run.request.token_ids) - 1)

    def _lives(self, holder: Holder, workers: Mapping[str, Worker]) -> bool:
        """One of these that gets requests, in its present life, and does not tell of its cache itself."""
        worker = workers.get(holder.engine)
        return (
            worker is not None and worker.is_usable and worker.epoch == holder.epoch and not self._caches.tells(worker)
        )

    def note_prefill(self, run: Run, prefill: Worker, moments: dict[str, float] | None) -> None:
        """The prompt was computed at `prefill`, with the ticket's help if it pulled."""
        if run.prefix is not None:
            was_pulled = moments is not None and Moment.KV_READY in moments
            self._metrics.prefix_tickets["used" if was_pulled else "unused"].inc()
            if was_pulled:
                self._metrics.prefix_tokens.inc(run.num_prefix_tokens)
                self._ledger.end(run.prefix, HoldState.PULLED)
        self.leave(run)
        self._extend(run, prefill)
        self._record(run, prefill, len(run.request.token_ids))

    def note_end(self, run: Run, worker: Worker) -> None:
        """The run ended well at `worker`, which has the KV of all tokens but the last."""
        if run.finish in ("stop", "length"):
            self._extend(run, worker)
            self._record(run, worker, len(run.request.token_ids) + run.num_output - 1)

    def leave(self, run: Run) -> None:
        """Give a ticket back that was not used."""
        self._releaser.leave(run.prefix)
        run.prefix = None

    def _record(self, run: Run, worker: Worker, num_tokens: int) -> None:
        self._index.record(run.pages[: num_tokens // run.num_page_tokens], Holder(worker.name, worker.epoch))

    def _extend(self, run: Run, worker: Worker) -> None:
        """Bring the run's pages up to its tokens, in this engine's block size."""
        block_size = STOCK_BLOCK_SIZE if worker.info is None else worker.info.block_size
        size = page_tokens(block_size, self._config.kv_recompute_threshold)
        if size != run.num_page_tokens:
            run.num_page_tokens, run.pages = size, []
        if len(run.pages) < (len(run.request.token_ids) + run.num_output) // size:
            extend_pages(run.pages, run.token_ids, size, run.request.cache_salt or "")

    def cached(self, run: Run) -> dict[str, int]:
        """Tokens of the prompt's beginning that engines have, by name: by their word, else by what they were sent."""
        workers = self._fleet.workers
        named, num_told = self._caches.holders(run)
        told = [name for name in named if name in workers and workers[name].is_usable]
        some = next((worker for worker in workers.values() if worker.info is not None), None)
        some = some or next(iter(workers.values()), None)
        if some is None:
            return {}
        self._extend(run, some)
        most = len(run.request.token_ids) - 1
        return {
            holder.engine: min(num_pages * run.num_page_tokens, most)
            for holder, num_pages in self._index.held(run.pages).items()
            if self._lives(holder, workers)
        } | dict.fromkeys(told, min(num_told, most))

    def knowing(self, cached: Mapping[str, int]) -> list[str]:
        """Who has most of the prompt's beginning, if that is worth anything."""
        most = max(cached.values(), default=0)
        if most < self._config.kv_recompute_threshold:
            return []
        return [name for name, num_tokens in cached.items() if num_tokens == most]

    @property
    def index(self) -> Prefixes:
        """Who is known to have which beginnings."""
        return self._index
