"""The gate before the engines: with targets a request enters when both sides have a place for it, or is refused."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from math import ceil, inf

from fourhop.router.admission import Queue, Waiter
from fourhop.router.config import GoodputConfig
from fourhop.router.fleet import Fleet
from fourhop.router.metrics import RouterMetrics
from fourhop.router.placement import PROMPTS_AHEAD, Placer, targets_of
from fourhop.router.run import Run
from fourhop.router.worker import Worker
from fourhop.wire.errors import Unavailable
from fourhop.wire.generate import GenerateRequest, Targets


def _nothing() -> None:
    """Nobody waits for a request that did not wait."""


OPEN = nullcontext(_nothing)


@dataclass
class Gate:
    """Lets requests in one by one: each is placed before it is decided whether there is room for the next."""

    config: GoodputConfig
    fleet: Fleet
    placer: Placer
    queue: Queue
    metrics: RouterMetrics
    clock: Callable[[], float]
    longest_wait_s: float
    _calls: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    _runs: dict[int, Run] = field(default_factory=dict)
    _entering: set[int] = field(default_factory=set)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def entered(self, run: Run, num_choices: int = 1) -> AbstractAsyncContextManager[Callable[[], None]]:
        """Wait for a place for a request, of which this is the first choice; what it gives is to be called when it is
        with an engine.

        Raises Unavailable, with when to come again, if the queue is full or the first token cannot be in time.
        """
        targets = targets_of(run.request, self.config)
        if not targets.ttft_ms and not targets.itl_ms and not self.queue:
            return OPEN
        return self._entered(run, targets, num_choices)

    @asynccontextmanager
    async def _entered(self, run: Run, targets: Targets, num_choices: int) -> AsyncIterator[Callable[[], None]]:
        self.placer.progress.watches = True
        waiter = self._waiter(run.request, targets, num_choices)
        self._runs[waiter.number] = run
        try:
            await self._wait(waiter)
            yield lambda: self._left(waiter)
        finally:
            del self._runs[waiter.number]
            self.queue.remove(waiter)
            self._left(waiter)

    def changed(self) -> None:
        """An engine has done something: let in who has room, and refuse who cannot be in time any more."""
        if not self.queue or self._entering:
            return
        wait_s, num_engines = self._outlook()
        for waiter, late_s in self.queue.take_late(self.clock(), wait_s, num_engines):
            self._call(waiter, self._refusal("late", late_s))
        first = self.queue.first
        if first is not None and self._has_room(first):
            self.queue.remove(first)
            self._entering.add(first.number)
            self._call(first, None)

    async def _wait(self, waiter: Waiter) -> None:
        now_s = self.clock()
        wait_s, num_engines = self._outlook()
        late_s = self.queue.late_s(waiter, now_s, wait_s, num_engines)
        if late_s > 0.0:
            raise self._refusal("late", late_s)
        if not self.queue and not self._entering and self._has_room(waiter):
            self._entering.add(waiter.number)
            return
        if self.queue.is_full:
            raise self._refusal("queue_full", wait_s + self.queue.total_s / max(1, num_engines))
        self.queue.add(waiter)
        call = self._calls[waiter.number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._patience_s(waiter, now_s)):
                await call
        except TimeoutError:
            raise self._refusal("late", waiter.prefill_s) from None
        finally:
            del self._calls[waiter.number]
            self.metrics.queue_s.observe(self.clock() - now_s)

    def _patience_s(self, waiter: Waiter, now_s: float) -> float:
        """How long it may wait: until its prompt could not be computed in time, and never for ever."""
        return min(self.longest_wait_s, max(0.0, waiter.deadline_s - waiter.prefill_s - now_s))

    def _waiter(self, request: GenerateRequest, targets: Targets, num_choices: int) -> Waiter:
        num_tokens = len(request.token_ids) + len(request.output_token_ids)
        prefill_s = min((worker.costs.prefill.at(num_tokens) for worker in self._usable()), default=0.0)
        deadline_s = self.clock() + targets.ttft_ms / 1e3 if targets.ttft_ms else inf
        return Waiter(request.priority, deadline_s, next(self._numbers), prefill_s, targets.itl_ms / 1e3, num_choices)

    def _usable(self) -> list[Worker]:
        """Engines that prompts may go to."""
        up = [worker for worker in self.fleet.workers.values() if worker.is_usable]
        prefill = [worker for worker in up if worker.role == "prefill"]
        splits = self.config.placement == "split" or (self.config.placement == "auto" and not self.placer.is_informed)
        return prefill if prefill and splits else up

    def _outlook(self) -> tuple[float, int]:
        """Seconds until the first engine has computed its prompts, and how many engines there are."""
        now_s, usable = self.clock(), self._usable()
        return min((worker.backlog.wait_s(now_s) for worker in usable), default=0.0), len(usable)

    def _has_room(self, waiter: Waiter) -> bool:
        """True if the prompt would soon be computed and its stream keep its pace, or an engine that may do all of it
        has nothing to do.

        Without an engine it is for others to say so.
        """
        usable = self._usable()
        if not usable:
            return True
        is_whole = any(one.role == "decode" for one in usable) or self.config.placement != "split"
        if is_whole and any(not one.backlog.prompts and not one.backlog.num_streams() for one in usable):
            return True
        fits = self.placer.fits(self._runs[waiter.number]) if self.config.placement == "auto" else None
        if fits is not None:
            return fits
        return any(len(worker.backlog.prompts) < PROMPTS_AHEAD for worker in usable) and self._has_place(waiter)

    def _has_place(self, waiter: Waiter) -> bool:
        """True if some engine can decode its share of the streams more within the target, or decodes none."""
        itl_s = waiter.itl_s
        if not itl_s:
            return True
        up = [worker for worker in self.fleet.workers.values() if worker.is_usable]
        decode = [worker for worker in up if worker.role == "decode"] or up
        share = ceil(waiter.num_streams / len(decode))
        return any(
            not (num_streams := worker.backlog.num_streams()) or worker.costs.step.at(num_streams + share) <= itl_s
            for worker in decode
        )

    def _refusal(self, cause: str, retry_after_s: float) -> Unavailable:
        self.metrics.shed.labels(cause).inc()
        why = "too many requests wait" if cause == "queue_full" else "the first token could not be in time"
        return Unavailable(f"{why}; come again later", retry_after_s=retry_after_s)

    def _call(self, waiter: Waiter, refusal: Unavailable | None) -> None:
        call = self._calls.get(waiter.number)
        if call is None or call.done():
            return
        if refusal is None:
            call.set_result(None)
        else:
            call.set_exception(refusal)

    def _left(self, waiter: Waiter) -> None:
        """It is with an engine, or gone: the next may enter."""
        if waiter.number in self._entering:
            self._entering.discard(waiter.number)
            self.changed()
