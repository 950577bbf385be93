"""One request over two engines: place, prefill, first token out, hand over, stream. `generate` is the whole story."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fourhop.router.fleet import Fleet, Verdict, Worker
from fourhop.router.ledger import HoldState, Ledger
from fourhop.router.metrics import RouterMetrics
from fourhop.router.policy import place, place_rest
from fourhop.router.release import Releaser
from fourhop.router.run import Leg, LegKind, Run
from fourhop.wire.errors import FourhopError, PeerError, PeerRefused
from fourhop.wire.generate import GenerateChunk
from fourhop.wire.moments import Moment
from fourhop.wire.ticket import KVTicket, parse_transfer_params, verify

log = logging.getLogger(__name__)

HOLD = {"do_remote_decode": True}


@dataclass(frozen=True)
class Split:
    """Carries runs through the fleet. Stateless but for the parts it is made of."""

    fleet: Fleet
    ledger: Ledger
    releaser: Releaser
    metrics: RouterMetrics
    max_retries: int
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    new_id: Callable[[], str]

    async def generate(self, run: Run) -> AsyncGenerator[GenerateChunk, None]:
        """Serve a run, leg by leg: the first prefills or does it all, the next goes on after what was delivered.

        A leg that fails is replaced by one that goes on at the same token, or its error ends the run. Whichever way
        the run ends, nothing that it held stays held.
        """
        try:
            while run.finish is None:
                run.leg = self._rest(run) if run.delivered else self._start(run)
                try:
                    async with aclosing(self._stream(run, run.leg)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                except FourhopError as error:
                    self._replace(run, run.leg, error)
            yield run.usage_chunk()
        finally:
            self.releaser.leave(run.hold)

    def _start(self, run: Run) -> Leg:
        """Place a run that has no token yet: a prefill leg that holds its blocks, or the whole of it on one engine."""
        candidates = self.fleet.candidates(run.excluded)
        placement = place(
            candidates,
            wants_split=not run.request.output_token_ids,
            max_tokens=run.request.sampling_params.max_tokens,
        )
        if placement is None:
            raise run.error or self.fleet.unavailable()
        run.reason = placement.reason
        run.timeline.mark(Moment.PLACED, self.clock())
        self.metrics.placements.labels(placement.reason).inc()
        worker = self.fleet.workers[placement.engine]
        if not placement.is_split:
            return self._leg(run, "whole", worker, None)
        leg = self._leg(run, "prefill", worker, HOLD)
        now_s = self.wall_clock()
        self.ledger.expire(now_s)
        run.hold = self.ledger.ask(leg.request.request_id, worker.name, now_s)
        return leg

    def _rest(self, run: Run) -> Leg:
        """Go on after the delivered tokens, with the KV of the prefill leg where it can be had."""
        exchange = None if run.ticket is None or run.hold is None else self.fleet.workers[run.hold.engine].exchange
        candidate = place_rest(self.fleet.candidates(run.excluded), exchange)
        if candidate is None:
            raise run.error or self.fleet.unavailable()
        worker = self.fleet.workers[candidate.name]
        if run.ticket is not None and worker.role == "decode" and worker.exchange == exchange:
            return self._leg(run, "decode", worker, run.ticket)
        if run.ticket is not None:
            self._give_up_transfer(run, "no_pair")
        return self._leg(run, "whole", worker, None)

    def _leg(self, run: Run, kind: LegKind, worker: Worker, transfer: dict[str, Any] | None) -> Leg:
        request = run.leg_request(self.new_id(), max_tokens=1 if kind == "prefill" else None, transfer=transfer)
        if not run.delivered:
            run.prefill = worker.name
        if kind != "prefill":
            run.decode = worker.name
        return Leg(kind, worker, request, self.clock())

    async def _stream(self, run: Run, leg: Leg) -> AsyncGenerator[GenerateChunk, None]:
        """One leg's chunks as the client sees them. A prefill leg is read to its end: closing it earlier aborts it."""
        num_before = len(run.delivered)
        with leg.worker.serving():
            async with aclosing(leg.worker.server.generate(leg.request)) as chunks:
                async for chunk in chunks:
                    if not chunk.choices:
                        run.note_usage(chunk.usage)
                        continue
                    shown = run.deliver(leg, chunk)
                    if leg.kind == "prefill" and chunk.choices[0].finish_reason is not None:
                        self._take_ticket(run, leg, chunk.kv_transfer_params)
                    elif leg.has_ticket:
                        self._note_pull(run)
                    if shown.choices[0].token_ids or run.finish is not None:
                        yield shown
        if run.finish is None and (leg.kind != "prefill" or len(run.delivered) == num_before):
            raise PeerError(f"{leg.worker.name} ended the stream early")
        self.fleet.succeeded(leg.worker)

    def _take_ticket(self, run: Run, leg: Leg, params: dict[str, Any] | None) -> None:
        """Check the ticket of a prefill leg's end. Without a good one the next engine computes the prompt again."""
        assert run.hold is not None
        if run.finish is not None:
            self.ledger.end(run.hold, HoldState.NEVER_HELD)
            return
        try:
            ticket = parse_transfer_params(params)
            if not isinstance(ticket, KVTicket):
                self._give_up_transfer(run, "no_ticket")
                return
            fingerprint = ticket.fingerprint if leg.worker.info is None else leg.worker.info.fingerprint
            verify(ticket, fingerprint=fingerprint, token_ids=run.request.token_ids, now_s=self.wall_clock())
        except FourhopError as error:
            log.warning("%s issued a bad ticket: %s", leg.worker.name, error.message)
            self._give_up_transfer(run, "bad_ticket")
            return
        self.ledger.issue(run.hold, ticket.ticket_id, ticket.expires_at_s)
        run.ticket = params

    def _note_pull(self, run: Run) -> None:
        """The decode engine has a token, so it needs the ticket no more; it says whether it pulled the KV."""
        if run.ticket is None or run.hold is None:
            return
        run.ticket = None
        at_s = run.timeline.at_s
        if Moment.KV_READY not in at_s:
            self._give_up_transfer(run, "recomputed")
            return
        self.ledger.end(run.hold, HoldState.PULLED)
        if Moment.PREFILL_DONE in at_s:
            self.metrics.handover_s.observe(max(0.0, at_s[Moment.KV_READY] - at_s[Moment.PREFILL_DONE]))

    def _give_up_transfer(self, run: Run, cause: str) -> None:
        self.metrics.no_transfer.labels(cause).inc()
        run.ticket = None
        self.releaser.leave(run.hold)

    def _replace(self, run: Run, leg: Leg, error: FourhopError) -> None:
        """Decide after a failed leg: return to try the rest elsewhere, or raise the error that ends the run."""
        verdict = self.fleet.failed(leg.worker, error)
        run.error = error
        if leg.kind == "prefill" and run.ticket is None:
            self._drop_hold(run, error)
        if run.finish is not None:
            return  # every token and the finish arrived; only the end of the stream did not
        if verdict is Verdict.REQUEST:
            raise error
        if verdict is Verdict.TRANSFER:
            if not leg.has_ticket:
                raise error
            self._give_up_transfer(run, "failed")
        else:
            run.excluded |= {leg.worker.name}
            if run.num_retries >= self.max_retries or (verdict is Verdict.BUSY and self._must_wait(run, leg)):
                raise error
            run.num_retries += 1
        self.metrics.retries.labels(verdict.name.lower()).inc()
        log.warning("request %s left %s: %s", run.request.request_id, leg.worker.name, error.message)

    def _must_wait(self, run: Run, leg: Leg) -> bool:
        """True if the back-pressure of one side would fall on the other: the client is to come back later.

        A stream that has begun is finished wherever it can be.
        """
        others = self.fleet.candidates(run.excluded)
        return not run.delivered and all(other.role != leg.worker.role for other in others)

    def _drop_hold(self, run: Run, error: FourhopError) -> None:
        """A prefill leg failed before its ticket came. An engine that refused holds nothing; another may."""
        if run.hold is not None and isinstance(error, PeerRefused) and not run.delivered:
            self.ledger.end(run.hold, HoldState.NEVER_HELD)
        self.releaser.leave(run.hold)
        run.hold = None
