"""What legs tell of their engines: the backlog of each, and what its work takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fourhop.router.backlog import Arrivals
from fourhop.router.conversations import Conversations
from fourhop.router.costs import EngineCosts
from fourhop.router.run import Leg, Run
from fourhop.router.worker import Worker
from fourhop.wire.generate import Usage
from fourhop.wire.moments import Moment

PAUSE_SHARE = 0.005
"""Of the gaps between tokens, those that may be pauses for a prompt that the router put among streams."""

MOST_CREDIT = 8.0


def _nothing() -> None:
    """Nobody waits."""


@dataclass
class Progress:
    """Is told of every leg: sent, first token, usage, closed. `common` is what all engines cost, taken together, and
    `arrivals` are the prompts for all of them; `changed` is called when an engine has done something. It `watches` from
    when its knowledge is first wanted.
    """

    common: EngineCosts
    arrivals: Arrivals
    conversations: Conversations
    clock: Callable[[], float]
    watches: bool = False
    changed: Callable[[], None] = _nothing

    def num_new_tokens(self, run: Run, worker: Worker, num_cached: int) -> int:
        """Tokens that an engine has to compute before the first that it makes, if its cache has what it is said to."""
        return max(1, len(run.request.token_ids) + run.num_output - int(num_cached * worker.costs.cache_trust))

    def announce(self, run: Run, worker: Worker) -> None:
        """The run's prompt will be sent to this engine: it has its place there, so that others need not wait for it."""
        if self.watches:
            seconds = worker.costs.prefill.at(self.num_new_tokens(run, worker, 0))
            worker.backlog.announce_prompt(run, seconds, self.clock())
            run.announced = worker
        if run.on_placed is not None:
            run.on_placed()

    def sent(self, run: Run, leg: Leg) -> None:
        """A leg is on its way to its engine."""
        if not self.watches:
            return
        self._withdraw(run)
        backlog, costs = leg.worker.backlog, leg.worker.costs
        leg.busy_before_s, leg.is_alone = costs.busy_s, not backlog.prompts
        if leg.kind != "decode":
            leg.num_new_tokens = self.num_new_tokens(run, leg.worker, self.conversations.num_cached(run, leg.worker))
            seconds = costs.prefill.at(leg.num_new_tokens)
            backlog.expect_prompt(leg, seconds, leg.sent_s, stays=leg.kind == "whole")
            self.arrivals.note(seconds, leg.sent_s)
            if run.is_late:
                backlog.mark_late(leg)
        elif run.reserved is not leg.worker:
            self.unreserve(run)
            backlog.expect_stream(leg, leg.sent_s)

    def began(self, run: Run, leg: Leg) -> None:
        """The engine made its first token of the leg."""
        leg.first_s = now_s = self.clock()
        if not self.watches:
            return
        backlog = leg.worker.backlog
        if leg.kind == "prefill":
            backlog.drop(leg, now_s)
        else:
            self.unreserve(run)
            backlog.begin_stream(leg, now_s)
            if run.is_late:
                backlog.mark_late(leg)
        if leg.kind == "decode":
            self._learn_handover(run, leg)
        else:
            self._learn_prefill(leg, now_s)
        self.changed()
        leg.busy_before_s = leg.worker.costs.busy_s

    def ended(self, run: Run, leg: Leg, usage: Usage | None) -> None:
        """The leg ended well: learn from the moments that its engine told, or else from when its tokens arrived."""
        if leg.first_s is None or usage is None or not self.watches:
            return
        details = usage.prompt_tokens_details
        if leg.kind != "decode" and details is not None:
            num_expected = usage.prompt_tokens + len(leg.request.output_token_ids) - leg.num_new_tokens
            leg.worker.costs.note_cached(num_expected, details.cached_tokens)
        if leg.kind != "prefill":
            self.common.note_output(usage.completion_tokens)
            backlog = leg.worker.backlog
            backlog.credit = min(MOST_CREDIT, backlog.credit + usage.completion_tokens * PAUSE_SHARE)
            self._learn_steps(leg, leg.first_s, usage.completion_tokens)

    def closed(self, leg: Leg) -> None:
        """Nothing more comes of the leg."""
        if self.watches:
            leg.worker.backlog.drop(leg, self.clock())
            self.changed()

    def reserve(self, run: Run, worker: Worker, ready_at_s: float) -> None:
        """Take a place at a decode engine for a run whose KV will be there at about that time."""
        run.reserved = worker
        worker.backlog.expect_stream(run, ready_at_s)
        if run.is_late:
            worker.backlog.mark_late(run)

    def leave(self, run: Run) -> None:
        """The run is placed no more."""
        self._withdraw(run)
        self.unreserve(run)

    def _withdraw(self, run: Run) -> None:
        if run.announced is not None:
            run.announced.backlog.withdraw_prompt(run)
            run.announced = None

    def unreserve(self, run: Run) -> None:
        if run.reserved is not None:
            run.reserved.backlog.drop(run, 0.0)
            run.reserved = None

    def _learn_prefill(self, leg: Leg, now_s: float) -> None:
        """How long the prompt took. An engine that tells no moments is believed only if it had nothing else to do."""
        costs, backlog, moments = leg.worker.costs, leg.worker.backlog, leg.moments
        if not leg.num_new_tokens:
            return  # sent before anybody watched
        if moments is None:
            if not leg.is_alone:
                return
            started_s, done_s = leg.sent_s, now_s
        elif Moment.PREFILL_STARTED in moments and Moment.PREFILL_DONE in moments:
            started_s = leg.sent_s + moments[Moment.PREFILL_STARTED]
            done_s = leg.sent_s + moments[Moment.PREFILL_DONE]
        else:
            return
        costs.note_prefill(leg.num_new_tokens, started_s, done_s)
        if not backlog.prompts:
            costs.settle()

    def _learn_handover(self, run: Run, leg: Leg) -> None:
        """How long the KV took after prefill, if the engine had no prompt of its own meanwhile."""
        costs = leg.worker.costs
        ready = None if leg.moments is None else leg.moments.get(Moment.KV_READY)
        prefilled_s = run.timeline.at_s.get(Moment.PREFILL_DONE)
        if ready is None or prefilled_s is None or not leg.is_alone or costs.busy_s > leg.busy_before_s:
            return
        costs.note_handover(len(run.request.token_ids), max(0.0, leg.sent_s + ready - prefilled_s))

    def _learn_steps(self, leg: Leg, first_s: float, num_output: int) -> None:
        """Seconds a token without those that the engine spent on prompts meanwhile."""
        costs, backlog, moments = leg.worker.costs, leg.worker.backlog, leg.moments
        num_steps = num_output - 1
        if moments is None:
            num_steps -= len(leg.request.output_token_ids)
            seconds = self.clock() - first_s
        else:
            since = moments.get(Moment.KV_READY if leg.kind == "decode" else Moment.PREFILL_DONE)
            last = moments.get(Moment.LAST_TOKEN)
            if since is None or last is None:
                return
            seconds = last - since
        if num_steps > 0:
            paused_s = costs.busy_s - leg.busy_before_s + backlog.computed_s(self.clock())
            costs.note_pace(seconds / num_steps)
            costs.note_step(len(backlog.streams), max(0.0, seconds - paused_s) / num_steps)
