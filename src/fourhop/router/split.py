"""One request over two engines: place, reserve decode, prefill, first token out, hand over, stream. See `generate`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from fourhop.router.conversations import Conversations
from fourhop.router.degraded import is_fallback
from fourhop.router.fleet import Fleet
from fourhop.router.handover import Handover, without_repeated
from fourhop.router.metrics import RouterMetrics
from fourhop.router.placement import Placer
from fourhop.router.policy import Candidate, Placement, place_rest
from fourhop.router.progress import Progress
from fourhop.router.run import Leg, LegKind, Run
from fourhop.router.verdict import Verdict, judge
from fourhop.router.worker import Worker
from fourhop.tokens.ahead import Ahead
from fourhop.wire.errors import FourhopError, PeerError, PeerRefused
from fourhop.wire.generate import GenerateChunk
from fourhop.wire.moments import Moment

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Split:
    """Carries runs through the fleet. Stateless but for the parts it is made of."""

    fleet: Fleet
    handover: Handover
    conversations: Conversations
    placer: Placer
    progress: Progress
    metrics: RouterMetrics
    max_retries: int
    clock: Callable[[], float]
    new_id: Callable[[], str]

    async def generate(self, run: Run) -> AsyncGenerator[GenerateChunk, None]:
        """Serve a run, leg by leg: the first prefills or does it all, the next goes on after what was delivered.

        A prefill leg's ticket comes before its token, and decode is sent with it at once: its place and blocks are
        reserved, and the KV travels, while the prompt is computed. A leg that fails is replaced by one that goes on at
        the same token, or its error ends the run. Whichever way the run ends, nothing that it held stays held.
        """
        try:
            while run.finish is None:
                leg = run.leg = await self._next_leg(run)
                try:
                    async for chunk in leg.chunks:
                        if is_ticket(chunk):
                            self._reserve_decode(run, leg, chunk)
                        elif (shown := self._take(run, leg, chunk)) is not None:
                            yield shown
                    self._end(run, leg)
                except FourhopError as error:
                    await self._replace(run, source_of(error, run, leg), error)
                finally:
                    self.progress.closed(leg)
                    await leg.close()
            yield run.usage_chunk()
        finally:
            await self._leave(run)

    async def _next_leg(self, run: Run) -> Leg:
        """The decode leg that is under way, or else the next one, placed."""
        if run.leaves is not None:
            await self._drop_ahead(run)
        if run.ahead is not None:
            leg, run.ahead = run.ahead, None
            leg.num_repeats = run.num_output - len(leg.request.output_token_ids)
            return leg
        if run.delivered or run.ticket is not None:
            return self._rest(run)
        return await self._start(run)

    async def _start(self, run: Run) -> Leg:
        """Place a run that has no token yet: a prefill leg that holds its blocks, or the whole of it on one engine."""
        placement = self.placer.place(run)
        if placement is None:
            raise run.error or self.fleet.unavailable()
        run.leaves = None
        run.reason, run.forecast = placement.reason, placement
        run.timeline.mark(Moment.PLACED, self.clock())
        run.told.append((run.timeline.at_s[Moment.PLACED], told_placement(placement)))
        self.metrics.placements[placement.reason].inc()
        if is_fallback(placement.reason, self.fleet):
            self.metrics.fallbacks.note(
                placement.reason, f"request {run.request.request_id} whole on {placement.engine}"
            )
        worker = self.fleet.workers[placement.engine]
        if not placement.is_split:
            return self._leg(run, "whole", worker, None)
        self.progress.announce(run, worker)
        prefix = None if run.owes_prompt_logprobs else await self.conversations.find(run, worker)
        if self.fleet.find(worker.name) is not worker:  # it left meanwhile
            return await self._start(run)
        return self._prefill(run, worker, prefix)

    def _prefill(self, run: Run, worker: Worker, prefix: dict[str, Any] | None) -> Leg:
        """A leg that holds its blocks; with a protocol that needs no answer the decode leg is sent with it."""
        self.handover.open(run, worker, self.new_id())
        if self.handover.names_decode(worker):
            chosen = place_rest(self.fleet.shortlist(run.excluded, run.holder), worker.exchange, prefer=run.holder)
            run.wanted = None if chosen is None or chosen.exchange != worker.exchange else chosen.name
        params = self.handover.ask(run, worker, self.fleet.find(run.wanted), prefix)
        leg = self._leg(run, "prefill", worker, params)
        self._send_ahead(run)
        return leg

    def _reserve_decode(self, run: Run, leg: Leg, chunk: GenerateChunk) -> None:
        """There is a ticket for what is still being computed: send the decode leg, to be read when prefill is done."""
        if leg.kind != "prefill" or run.ahead is not None or chunk.kv_transfer_params is None:
            return
        self.handover.take_early(run, leg, chunk.kv_transfer_params)
        self._send_ahead(run)

    def _send_ahead(self, run: Run) -> None:
        """The decode leg, if there is a ticket for it already."""
        if run.ticket is None:
            return
        candidate, can_pull = self._candidate(run)
        if candidate is not None and can_pull:
            run.ahead = self._leg(run, "decode", self.fleet.workers[candidate.name], run.ticket, ahead=True)

    def _rest(self, run: Run) -> Leg:
        """Go on after the delivered tokens, with KV that another engine holds where it can be had."""
        self.handover.give_up_spent(run)
        candidate, can_pull = self._candidate(run)
        if candidate is None:
            raise run.error or self.fleet.unavailable()
        run.leaves = run.wanted = None
        worker = self.fleet.workers[candidate.name]
        if can_pull:
            return self._leg(run, "decode", worker, run.ticket)
        if run.ticket is not None:
            self.handover.give_up(run, "no_pair")
        return self._leg(run, "whole", worker, None)

    def _candidate(self, run: Run) -> tuple[Candidate | None, bool]:
        """Where the run goes on, and whether that engine can use its ticket."""
        source = None if run.ticket is None or run.hold is None else self.fleet.find(run.hold.engine)
        exchange = None if source is None else source.exchange
        candidates = self.fleet.shortlist(run.excluded, run.wanted, run.holder, run.place)
        asked_for = [one for one in candidates if one.name == run.wanted]
        chosen = place_rest(asked_for or candidates, exchange, prefer=run.holder or run.place, avoid=run.leaves)
        can_pull = (
            chosen is not None and source is not None and chosen.name != source.name and chosen.exchange == exchange
        )
        return chosen, can_pull and exchange is not None

    def _leg(
        self, run: Run, kind: LegKind, worker: Worker, transfer: dict[str, Any] | None, *, ahead: bool = False
    ) -> Leg:
        shared = run.hold.request_id if kind == "prefill" and run.hold else self.handover.decode_id(run)
        request = run.leg_request(kind, shared or self.new_id(), transfer)
        if kind != "decode" and not run.delivered:
            run.prefill = worker.name
        if kind != "prefill":
            run.decode = worker.name
        if kind == "decode":
            self.handover.pass_on(run)
        chunks = worker.server.generate(request)
        leg = Leg(kind, worker, request, self.clock(), Ahead(chunks) if ahead else chunks)
        run.told.append((leg.sent_s, told_leg(run, leg)))
        self.progress.sent(run, leg)
        if run.on_placed is not None:
            run.on_placed()
        return leg

    def _take(self, run: Run, leg: Leg, chunk: GenerateChunk) -> GenerateChunk | None:
        """Take in what an engine sent; returns what the client sees of it."""
        leg.worker.num_heard += 1
        if not chunk.choices:
            run.note_usage(chunk.usage)
            self.progress.ended(run, leg, chunk.usage)
            return None
        run.note_moments(leg, chunk.moments)
        choice = chunk.choices[0]
        if leg.num_repeats and choice.token_ids:
            choice = without_repeated(run, leg, choice)
        if leg.kind == "prefill" and choice.finish_reason in (None, "length"):
            heed_decode(run)
        if leg.first_s is None and choice.token_ids:
            self.progress.began(run, leg)
        shown = run.deliver(leg, choice, chunk.prompt_logprobs)
        if choice.finish_reason == "migrated":
            self.handover.take_moved(run, leg, chunk.kv_transfer_params)
        elif leg.kind == "prefill":
            if choice.finish_reason is not None:
                self.handover.take_last(run, leg, chunk.kv_transfer_params)
            if choice.finish_reason in ("stop", "length"):
                self.conversations.note_prefill(run, leg.worker, chunk.moments)
        elif leg.has_ticket:
            self._note_decode(run, leg, has_token=bool(choice.token_ids))
        return shown

    def _note_decode(self, run: Run, leg: Leg, *, has_token: bool) -> None:
        self.handover.note_pull(run, leg)
        if has_token and not leg.has_begun:
            leg.has_begun = True
            done_s = run.timeline.at_s.get(Moment.PREFILL_DONE)
            if done_s is not None:
                self.metrics.handover_s.observe(max(0.0, self.clock() - done_s))

    def _end(self, run: Run, leg: Leg) -> None:
        """A leg's stream ended without an error. A prefill leg must have left a token, another one a finish."""
        if run.finish is None and run.leaves is None and (leg.kind != "prefill" or not run.delivered):
            raise PeerError(f"{leg.worker.name} ended the stream early")
        self.fleet.succeeded(leg.worker)
        if leg.kind != "prefill":
            self.conversations.note_end(run, leg.worker)

    async def _replace(self, run: Run, leg: Leg, error: FourhopError) -> None:
        """Decide after a failed leg: return to try the rest elsewhere, or raise the error that ends the run."""
        verdict = self.fleet.failed(leg.worker, error)
        run.error = error
        run.told.append((self.clock(), f"{leg.worker.name} failed it: {error.message}"))
        if run.finish is not None:
            return  # every token and the finish arrived; only the end of the stream did not
        if verdict is Verdict.FLEET:
            self.metrics.disagreements.inc()
            log.error("request %s: %s", run.request.request_id, error.message)
        if verdict in (Verdict.FLEET, Verdict.REQUEST):
            raise error
        if leg.kind == "prefill" and (run.ticket is None or not run.delivered):
            await self._drop_ahead(run)
            self.handover.drop(run, was_refused=isinstance(error, PeerRefused) and not run.delivered)
        if verdict is Verdict.TRANSFER and leg.has_ticket:
            self.handover.fail(run, error)
        elif run.ahead is None:
            run.excluded |= {leg.worker.name}
            if run.num_retries >= self.max_retries or (verdict is Verdict.BUSY and self._must_wait(run, leg)):
                raise error
            run.num_retries += 1
        self.metrics.retries.labels(verdict.name.lower()).inc()
        what = f"request {run.request.request_id} left {leg.worker.name}: {error.message}"
        self.metrics.fallbacks.note(f"retry_{verdict.name.lower()}", what)

    def _must_wait(self, run: Run, leg: Leg) -> bool:
        """True if the back-pressure of one side would fall on the other: the client is to come back later.

        A stream that has begun is finished wherever it can be.
        """
        others = self.fleet.candidates(run.excluded)
        return not run.delivered and all(other.role != leg.worker.role for other in others)

    async def _drop_ahead(self, run: Run) -> None:
        if run.ahead is not None:
            leg, run.ahead = run.ahead, None
            self.progress.closed(leg)
            await leg.close()

    async def _leave(self, run: Run) -> None:
        """The run is over: nothing that it asked of any engine goes on."""
        self.handover.releaser.leave(run.hold)
        self.conversations.leave(run)
        self.progress.leave(run)
        await self._drop_ahead(run)


def is_ticket(chunk: GenerateChunk) -> bool:
    """True for the chunk that comes before all others and has nothing but a ticket."""
    return not chunk.choices and chunk.kv_transfer_params is not None


def heed_decode(run: Run) -> None:
    """Raise what decode called wrong before there was a token: it can still be the status of the whole answer."""
    failure = None if run.ahead is None else run.ahead.failure
    if not run.delivered and isinstance(failure, FourhopError) and judge(failure) is Verdict.REQUEST:
        raise failure


def source_of(error: FourhopError, run: Run, leg: Leg) -> Leg:
    """Whose error it is that was met while `leg` was read."""
    return run.ahead if run.ahead is not None and run.ahead.failure is error else leg


def told_placement(placement: Placement) -> str:
    """The decision in words, for who asks why."""
    text = f"placed: {placement.reason}"
    if placement.ttft_s is None or placement.itl_s is None:
        return text
    return f"{text}; predicted TTFT {placement.ttft_s * 1e3:.0f} ms, ITL {placement.itl_s * 1e3:.1f} ms"


def told_leg(run: Run, leg: Leg) -> str:
    """What an engine is asked for, in words."""
    what = {"prefill": "prefill", "decode": "decode with the prefill engine's KV", "whole": "all of it"}[leg.kind]
    if leg.kind == "whole" and run.delivered:
        what = f"the rest, without KV ({run.without_kv or 'none is held'})"
    return f"{leg.worker.name} is asked for {what}"
