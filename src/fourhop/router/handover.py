"""What a run does with tickets: ask for a hold, take the ticket, see it pulled, or give it up; the ledger is told."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from fourhop.router.fleet import Fleet
from fourhop.router.ledger import HoldState, Ledger
from fourhop.router.metrics import RouterMetrics
from fourhop.router.release import Releaser
from fourhop.router.run import Leg, Run
from fourhop.wire.errors import EnginesDisagree, FourhopError, TransferError
from fourhop.wire.generate import ChunkChoice
from fourhop.wire.logprobs import ChoiceLogprobs
from fourhop.wire.moments import Moment
from fourhop.wire.ticket import KVTicket, parse_transfer_params, verify

log = logging.getLogger(__name__)

CAUSE = re.compile(r"KV transfer failed \(([a-z_]{1,30})\)")


def cause_of(error: FourhopError) -> str:
    """The word for a metric's label of a transfer that failed, here or at an engine."""
    if isinstance(error, TransferError):
        return error.cause
    found = CAUSE.match(error.message)
    return "other" if found is None else found[1]


@dataclass(frozen=True)
class Handover:
    """The tickets of runs. A run has at most one that is not pulled, `run.ticket`, for the hold `run.hold`."""

    fleet: Fleet
    ledger: Ledger
    releaser: Releaser
    metrics: RouterMetrics
    wall_clock: Callable[[], float]

    def ask(self, run: Run, leg: Leg) -> None:
        """A leg that will hold is about to be sent."""
        now_s = self.wall_clock()
        self.ledger.expire(now_s)
        run.hold = self.ledger.ask(leg.request.request_id, leg.worker.name, leg.worker.epoch, now_s)

    def take_early(self, run: Run, leg: Leg, params: dict[str, Any]) -> None:
        """The ticket of a prompt that is still to be computed. A bad one is not used; it is released with its leg."""
        self._take(run, leg, params)

    def take_last(self, run: Run, leg: Leg, params: dict[str, Any] | None) -> None:
        """A prefill leg's end. Without a good ticket the next engine computes the prompt again."""
        assert run.hold is not None
        if run.finish is not None:  # the engine holds nothing for a request that is over
            was_issued = run.hold.state is HoldState.ISSUED
            self.ledger.end(run.hold, HoldState.RELEASED if was_issued else HoldState.NEVER_HELD)
            run.has_ticket = False
        elif params is None:
            self.give_up(run, "no_ticket" if run.ticket is None else "withdrawn")
        elif params.get("ticket_id") != run.hold.ticket_id and not self._take(run, leg, params):
            self.give_up(run, "bad_ticket")
        else:
            run.has_ticket = True
            self.ledger.renew(run.hold, params, self.wall_clock())

    def take_moved(self, run: Run, leg: Leg, params: dict[str, Any] | None) -> None:
        """The run shall go on elsewhere, with what the engine it leaves had computed, if that holds it."""
        self.releaser.leave(run.hold)
        run.has_ticket, run.leaves = False, leg.worker.name
        if params is not None and leg.kind != "prefill":  # what is left of a prefill leg goes by its own hold
            self.ask(run, leg)
            if not self._take(run, leg, params):
                self.give_up(run, "bad_ticket")
        self.metrics.moved.labels("no_ticket" if run.ticket is None else "ticket").inc()

    def pass_on(self, run: Run) -> None:
        """A decode engine is given the ticket, and keeps its lease alive from now on."""
        if run.hold is not None:
            run.hold.is_taken = True

    def note_pull(self, run: Run, leg: Leg) -> None:
        """The decode engine has a token, so it needs the ticket no more; it says whether it pulled the KV."""
        if run.ticket is None or run.hold is None:
            return
        at_s = run.timeline.at_s
        if Moment.KV_READY not in at_s:
            self.give_up(run, "recomputed")
            return
        run.has_ticket = False
        self.ledger.end(run.hold, HoldState.PULLED)
        requested_s = at_s.get(Moment.KV_REQUESTED, leg.sent_s)
        self.metrics.transfer_wait_s.observe(max(0.0, requested_s - leg.sent_s))
        self.metrics.transfer_s.observe(max(0.0, at_s[Moment.KV_READY] - requested_s))

    def fail(self, run: Run, error: FourhopError) -> None:
        """A decode engine could not pull."""
        self.metrics.transfer_failures.labels(cause_of(error)).inc()
        self.give_up(run, "failed")

    def give_up(self, run: Run, cause: str) -> None:
        """Go on without KV, which costs the next engine a prefill."""
        self.metrics.no_transfer.labels(cause).inc()
        run.has_ticket = False
        self.releaser.leave(run.hold)

    def drop(self, run: Run, *, was_refused: bool) -> None:
        """A prefill leg failed without anything to go on with. An engine that refused holds nothing; another may."""
        run.has_ticket = False
        if run.hold is not None and was_refused and run.hold.state is HoldState.ASKED:
            self.ledger.end(run.hold, HoldState.NEVER_HELD)
        self.releaser.leave(run.hold)
        run.hold = None

    def _take(self, run: Run, leg: Leg, params: dict[str, Any]) -> bool:
        """Whether the ticket is good; then it is the run's."""
        assert run.hold is not None
        try:
            ticket = parse_transfer_params(params)
            if not isinstance(ticket, KVTicket):
                raise TransferError("protocol", "these transfer parameters are no ticket")
            fingerprint = ticket.fingerprint if leg.worker.info is None else leg.worker.info.fingerprint
            now_s = self.wall_clock()
            verify(ticket, fingerprint=fingerprint, token_ids=run.token_ids[: ticket.num_tokens], now_s=now_s)
        except FourhopError as error:
            log.warning("%s issued a bad ticket: %s", leg.worker.name, error.message)
            return False
        if run.hold.state is not HoldState.ASKED:
            return False
        self.ledger.issue(run.hold, ticket, now_s)
        run.has_ticket = True
        return True


def without_repeated(run: Run, leg: Leg, choice: ChunkChoice) -> ChunkChoice:
    """The choice less the tokens that prefill made already, which must be the same. Raises EnginesDisagree."""
    known = run.delivered[-leg.num_repeats :]
    again = choice.token_ids[: leg.num_repeats]
    if again != known[: len(again)]:
        raise EnginesDisagree(f"{run.prefill} made the tokens {known} where {leg.worker.name} made {again}")
    leg.num_repeats -= len(again)
    logprobs = None if choice.logprobs is None else ChoiceLogprobs(choice.logprobs.content[len(again) :])
    return msgspec.structs.replace(choice, token_ids=choice.token_ids[len(again) :], logprobs=logprobs)
