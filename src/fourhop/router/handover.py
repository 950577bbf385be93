"""What a run does with tickets: ask for a hold, take the ticket, see it pulled, or give it up; the ledger is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from fourhop.router.fleet import Fleet
from fourhop.router.handoff.kinds import STOCK, TICKETS
from fourhop.router.handoff.protocol import Answer, Endpoint, Handoff, Question
from fourhop.router.ledger import HoldState, Ledger
from fourhop.router.metrics import RouterMetrics
from fourhop.router.release import Releaser
from fourhop.router.run import Leg, Run
from fourhop.router.worker import Worker
from fourhop.tokens.continued import without_first
from fourhop.wire.errors import EnginesDisagree, FourhopError, TransferError
from fourhop.wire.generate import ChunkChoice
from fourhop.wire.moments import Moment

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

    def names_decode(self, worker: Worker) -> bool:
        """True if a decode engine must be chosen before this prefill engine is asked."""
        return _handoff(worker).names_decode

    def ask(
        self, run: Run, worker: Worker, decode: Worker | None = None, prefix: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """What a prefill leg is sent, so that it holds. If the run has a ticket then, both legs can be sent."""
        assert run.hold is not None
        handoff = _handoff(worker)
        question = Question(
            run.hold.request_id,
            _endpoint(worker),
            None if decode is None else _endpoint(decode),
            prefix,
            self.wall_clock(),
        )
        handle = handoff.at_once(question)
        if handle is not None:
            self.ledger.issue(run.hold, handle, question.now_s)
            run.has_ticket = True
        return handoff.ask(question)

    def open(self, run: Run, worker: Worker, request_id: str) -> None:
        """Something that may hold is about to be sent, under this id."""
        run.hold = self.ledger.ask(request_id, worker.name, worker.epoch, self.wall_clock())

    def decode_id(self, run: Run) -> str | None:
        """The id that a decode leg must have for its engine to find the prefill leg; None if any will do."""
        if run.ticket is None or run.hold is None:
            return None
        source = self.fleet.find(run.hold.engine)
        return run.hold.request_id if source is not None and _handoff(source).shares_id else None

    def take_early(self, run: Run, leg: Leg, params: dict[str, Any]) -> None:
        """The ticket of a prompt that is still to be computed. A bad one is not used; it is released with its leg."""
        if (why := self._take(run, leg, params)) is not None:
            self.metrics.fallbacks.note("early_ticket", why)

    def take_last(self, run: Run, leg: Leg, params: dict[str, Any] | None) -> None:
        """A prefill leg's end. Without a good ticket the next engine computes the prompt again."""
        assert run.hold is not None
        if run.finish is not None:
            self._end_unused(run, leg, params)
        elif not _handoff(leg.worker).answers:  # decode was told all it needs, or finds KV by its tokens
            if run.hold.state is HoldState.ASKED:
                self.ledger.end(run.hold, HoldState.NEVER_HELD)
        elif params is None:
            self.give_up(run, "no_ticket" if run.ticket is None else "withdrawn")
        elif run.hold.state is HoldState.ISSUED and params.get("ticket_id") == run.hold.ticket_id:
            run.has_ticket = True
            self.ledger.renew(run.hold, params, self.wall_clock())
        elif (why := self._take(run, leg, params)) is not None:
            self.give_up(run, "bad_ticket", why)

    def _end_unused(self, run: Run, leg: Leg, params: dict[str, Any] | None) -> None:
        """The first token ended the request. Our engines then hold nothing; a stock vLLM holds all the same."""
        assert run.hold is not None
        if params is not None and self._take(run, leg, params) is None:
            self.releaser.leave(run.hold)
        else:
            was_issued = run.hold.state is HoldState.ISSUED
            self.ledger.end(run.hold, HoldState.RELEASED if was_issued else HoldState.NEVER_HELD)
        run.has_ticket = False

    def take_moved(self, run: Run, leg: Leg, params: dict[str, Any] | None) -> None:
        """The run shall go on elsewhere, with what the engine it leaves had computed, if that holds it."""
        self.releaser.leave(run.hold)
        run.has_ticket, run.leaves = False, leg.worker.name
        if params is not None and leg.kind != "prefill":  # what is left of a prefill leg goes by its own hold
            self.open(run, leg.worker, leg.request.request_id)
            if (why := self._take(run, leg, params)) is not None:
                self.give_up(run, "bad_ticket", why)
        self.metrics.moved.labels("no_ticket" if run.ticket is None else "ticket").inc()
        if run.ticket is None and leg.kind != "prefill":
            self.metrics.fallbacks.note("moved_without_kv", f"request {run.request.request_id} left {leg.worker.name}")

    def pass_on(self, run: Run) -> None:
        """A decode engine is given the ticket, and keeps its lease alive from now on."""
        if run.hold is not None:
            run.hold.is_taken = True

    def note_pull(self, run: Run, leg: Leg) -> None:
        """The decode engine has a token, so it needs the ticket no more; it says whether it pulled the KV."""
        if run.ticket is None or run.hold is None:
            return
        at_s = run.timeline.at_s
        has_told = Moment.KV_READY in at_s
        if _handoff(leg.worker).tells_pulls and not has_told:
            self.give_up(run, "recomputed")
            return
        run.has_ticket = False
        self.ledger.end(run.hold, HoldState.PULLED)
        if not has_told:
            return
        requested_s = at_s.get(Moment.KV_REQUESTED, leg.sent_s)
        self.metrics.transfer_wait_s.observe(max(0.0, requested_s - leg.sent_s))
        self.metrics.transfer_s.observe(max(0.0, at_s[Moment.KV_READY] - requested_s))

    def fail(self, run: Run, error: FourhopError) -> None:
        """A decode engine could not pull."""
        self.metrics.transfer_failures.labels(cause_of(error)).inc()
        self.give_up(run, "failed", error.message)

    def give_up(self, run: Run, cause: str, why: str = "") -> None:
        """Go on without KV, which costs the next engine a prefill."""
        self.metrics.no_transfer.labels(cause).inc()
        self.metrics.fallbacks.note(f"kv_{cause}", why or f"request {run.request.request_id}")
        run.has_ticket, run.without_kv = False, cause
        self.releaser.leave(run.hold)

    def give_up_spent(self, run: Run) -> None:
        """A handle that works once is not sent again, nor one whose lease is nearly over."""
        if run.ticket is not None and run.hold is not None and run.hold.is_spent(self.wall_clock()):
            self.give_up(run, "used" if run.hold.is_taken else "late")

    def drop(self, run: Run, *, was_refused: bool) -> None:
        """A prefill leg failed without anything to go on with. An engine that refused holds nothing; another may."""
        run.has_ticket = False
        if run.hold is not None and was_refused and run.hold.state is HoldState.ASKED:
            self.ledger.end(run.hold, HoldState.NEVER_HELD)
        self.releaser.leave(run.hold)
        run.hold = None

    def _take(self, run: Run, leg: Leg, params: dict[str, Any]) -> str | None:
        """Why a ticket is no good; None if it is, and it is the run's then."""
        assert run.hold is not None
        try:
            now_s, info = self.wall_clock(), leg.worker.info
            fingerprint = None if info is None else info.fingerprint
            answer = Answer(params, run.token_ids, len(run.request.token_ids), fingerprint, now_s)
            handle = _handoff(leg.worker).take(answer)
        except FourhopError as error:
            return f"{leg.worker.name} issued a bad ticket: {error.message}"
        if run.hold.state is not HoldState.ASKED:
            return f"{leg.worker.name} issued a second ticket"
        self.ledger.issue(run.hold, handle, now_s)
        run.has_ticket = True
        return None


def _handoff(worker: Worker) -> Handoff:
    """The protocol of an engine: ours for ours, the configured one for a stock vLLM."""
    return TICKETS if worker.info is not None or worker.handoff is None else STOCK[worker.handoff]


def _endpoint(worker: Worker) -> Endpoint:
    """Where an engine's connector listens, with the name that it gave if it was asked."""
    named = worker.control.engine_id
    return msgspec.structs.replace(worker.endpoint, engine_id=named) if named else worker.endpoint


def without_repeated(run: Run, leg: Leg, choice: ChunkChoice) -> ChunkChoice:
    """The choice less the tokens that prefill made already, which must be the same. Raises EnginesDisagree."""
    known = run.delivered[-leg.num_repeats :]
    again = choice.token_ids[: leg.num_repeats]
    if again != known[: len(again)]:
        raise EnginesDisagree(f"{run.prefill} made the tokens {known} where {leg.worker.name} made {again}")
    leg.num_repeats -= len(again)
    return without_first(choice, len(again))
