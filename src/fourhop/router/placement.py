"""Placing a run: how the fleet would serve it at this moment, and the choice that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fourhop.router.choice import Aim, Option, Prospect, aim_of, choose
from fourhop.router.config import GoodputConfig
from fourhop.router.fleet import Fleet
from fourhop.router.policy import Placement, Reason, evened, place, place_whole
from fourhop.router.progress import Progress
from fourhop.router.run import Run
from fourhop.router.worker import Worker
from fourhop.wire.generate import GenerateRequest, Targets
from fourhop.wire.moments import Moment

PROMPTS_AHEAD = 2
"""Prompts that an engine is given at once where requests wait their turn: one to compute, and the next, so that it
never idles."""

LEAST_LEFT_S = 1e-3
"""What is left of a target that is missed."""

SURELY_MISSED = 0.5
"""Expected misses with which a request had better wait."""


def targets_of(request: GenerateRequest, config: GoodputConfig) -> Targets:
    """A request's own targets, and the configured ones where it has none."""
    own = request.targets
    if own is None:
        return Targets(ttft_ms=config.ttft_ms, itl_ms=config.itl_ms)
    return Targets(ttft_ms=own.ttft_ms or config.ttft_ms, itl_ms=own.itl_ms or config.itl_ms)


def can_split(workers: Sequence[Worker]) -> bool:
    """Whether some prefill engine can hand over to some decode engine."""
    exchanges = {worker.exchange for worker in workers if worker.role == "decode"} - {None}
    return any(worker.role == "prefill" and worker.exchange in exchanges for worker in workers)


@dataclass(frozen=True)
class Placer:
    """Decides for each run that has no token yet, by `--placement`."""

    config: GoodputConfig
    fleet: Fleet
    progress: Progress
    clock: Callable[[], float]

    @property
    def is_informed(self) -> bool:
        """True once enough was seen to choose by what is predicted."""
        return self.progress.common.is_known

    def place(self, run: Run) -> Placement | None:
        """Where a run starts; None if no engine is there."""
        self.progress.leave(run)
        chooses = self.config.placement == "auto" and self.is_informed
        num_prefill = self.fleet.num_prefill
        has_choice = chooses or max(num_prefill, len(self.fleet.workers) - num_prefill) > 1
        cached = self.progress.conversations.cached(run) if has_choice else {}
        workers = self.fleet.few(run.excluded, *cached)
        is_new, most = not run.request.output_token_ids, run.request.sampling_params.max_tokens
        if chooses and is_new and most != 1 and can_split(workers):
            return self._choose(run, workers, cached)
        candidates = [worker.as_candidate() for worker in workers]
        knowing = self.progress.conversations.knowing(cached)
        if self.config.placement == "local":
            return place_whole(candidates, Reason.LOCAL, knowing)
        found = place(candidates, wants_split=is_new, max_tokens=most, prefer=knowing)
        if found is not None and found.is_split and self.config.placement == "auto":
            found = evened(found, candidates)
        if found is None or not found.is_split:
            return found
        if self.config.ttft_ms or self.config.itl_ms or run.request.targets:
            self._reserve(run, self.fleet.workers[found.engine], workers)
        return found

    def _reserve(self, run: Run, start: Worker, workers: list[Worker]) -> None:
        """Take a place at the decode engine with the fewest streams that can have the KV."""
        takers = [worker for worker in workers if worker.role == "decode" and worker.exchange == start.exchange]
        now_s = self.clock()
        ready_at_s = now_s + start.backlog.wait_s(now_s) + start.costs.prefill.at(len(run.request.token_ids))
        self.progress.reserve(run, min(takers, key=lambda one: (one.backlog.num_streams(), one.name)), ready_at_s)

    def fits(self, run: Run) -> bool | None:
        """Whether the run, placed now, is predicted to be in time and to make nobody late; None if nobody can tell."""
        cached = self.progress.conversations.cached(run)
        workers = self.fleet.few(run.excluded, *cached)
        if not can_split(workers) or not self.is_informed:
            return None
        option, _ = self._weigh(run, workers, cached, self.clock())
        start = self.fleet.workers[option.engine]
        return option.num_missed < SURELY_MISSED and len(start.backlog.prompts) < PROMPTS_AHEAD

    def _choose(self, run: Run, workers: list[Worker], cached: Mapping[str, int]) -> Placement:
        now_s = self.clock()
        option, reason = self._weigh(run, workers, cached, now_s)
        self._book(run, option, now_s)
        return Placement(option.engine, reason, option.ttft_s, option.itl_s)

    def _weigh(self, run: Run, workers: list[Worker], cached: Mapping[str, int], now_s: float) -> tuple[Option, Reason]:
        aim = self._aim(run, workers, now_s)
        rate = self.progress.arrivals.rate(now_s) / max(1, self.fleet.num_prefill)
        prefill = [
            self._prospect(run, worker, cached, now_s, aim, rate) for worker in workers if worker.role == "prefill"
        ]
        split_at_s = min((one.ttft_s for one in prefill), default=0.0)
        decode = [
            self._prospect(run, worker, cached, now_s, aim, 0.0, split_at_s)
            for worker in workers
            if worker.role == "decode"
        ]
        return choose(prefill, decode, aim)

    def _aim(self, run: Run, workers: list[Worker], now_s: float) -> Aim:
        """The targets of the run: what is configured, or multiples of what an idle engine takes for it."""
        common, targets = self.progress.common, targets_of(run.request, self.config)
        num_prompt, costs = len(run.request.token_ids), [worker.costs for worker in workers]
        waited_s = now_s - run.timeline.at_s[Moment.RECEIVED]
        most = run.request.sampling_params.max_tokens
        num_output = common.num_output if most is None else min(most, common.num_output)
        return aim_of(
            max(LEAST_LEFT_S, targets.ttft_ms / 1e3 - waited_s) if targets.ttft_ms else 0.0,
            targets.itl_ms / 1e3,
            idle_prefill_s=min([one.prefill.at(num_prompt) for one in costs]),
            idle_step_s=common.idle_step_s,
            num_output=num_output,
        )

    def _prospect(
        self,
        run: Run,
        worker: Worker,
        cached: Mapping[str, int],
        now_s: float,
        aim: Aim,
        usual_rate: float,
        ready_s: float = 0.0,
    ) -> Prospect:
        """`usual_rate` is how often prompts come that are split; a stream does not begin before `ready_s` from now."""
        costs, backlog = worker.costs, worker.backlog
        num_new = self.progress.num_new_tokens(run, worker, cached.get(worker.name, 0))
        wait_s, prefill_s = backlog.wait_s(now_s), costs.prefill.at(num_new)
        ttft_s, num_streams = wait_s + prefill_s, backlog.num_streams()
        life_s = costs.step.at(num_streams + 1) * self.progress.common.num_output
        num_beside = backlog.num_beside(now_s + max(ready_s, ttft_s), life_s)
        company = backlog.company(num_beside)
        num_paused, num_kept = backlog.num_paused_by(now_s + ttft_s)
        return Prospect(
            name=worker.name,
            exchange=worker.exchange,
            wait_s=wait_s,
            prefill_s=prefill_s,
            handover_s=costs.handover.at(len(run.request.token_ids)) if worker.role == "decode" else 0.0,
            step_s=costs.step.at(company + 1.0),
            now_step_s=costs.step.at(max(1.0, company)),
            pause_rate=backlog.pause_rate(now_s, usual_rate),
            pause_s=max(0.0, self.progress.arrivals.usual_s - costs.step.at(0.0)),
            num_paused=num_paused,
            num_kept=num_kept,
            num_streams=num_streams,
            num_new_tokens=num_new,
            num_beside=num_beside,
            credit=backlog.credit,
        )

    def _book(self, run: Run, option: Option, now_s: float) -> None:
        """Take what the choice costs: the pauses, and a place at the decode engine before prefill starts."""
        self.fleet.workers[option.engine].backlog.credit -= option.num_paused
        self.fleet.workers[option.decode].backlog.note_company(option.num_beside)
        run.is_late = option.is_late
        if option.is_split:
            self.progress.reserve(run, self.fleet.workers[option.decode], now_s + option.ttft_s)
