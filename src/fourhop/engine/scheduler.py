"""Which tokens the next step computes. Pure: values in, values out; the loop does what a `Step` says.

A step takes decodes first (one token each), then continues prefills, then admits waiting sequences in order of
arrival, all under one token budget. A waiting sequence is admitted with the blocks of its whole prompt or not at all,
so admitted sequences never wait for one another. When a running one needs a block and none is free, the youngest
running sequence gives its blocks back and waits at the front, to be recomputed: the oldest always goes on. Blocks that
another engine may be reading (`held_as`) are never given back.

Blocks travel from step to step, and what a hand-over waits for is those of the last one: a step that computes a prompt
to be held takes no more than `max_handover_tokens` of prompts, beside its decodes.

A sequence that wants its prompt's log-probabilities computes every token of it, in chunks small enough for their logits
(`max_prompt_logits`), and finds nothing in the prefix cache, as in vLLM: what is cached has no logits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from fourhop.engine.blocks import BlockPool, extend_hashes
from fourhop.engine.cachelog import CacheLog
from fourhop.engine.sequence import Finish, Phase, Sequence, finish_of
from fourhop.engine.step import Limits, Load, Step, Work


@dataclass(frozen=True)
class Occupancy:
    """How full the engine is, as one value that other threads may read."""

    num_running: int
    num_waiting: int
    num_loading: int
    num_held: int
    num_held_blocks: int
    num_free_blocks: int
    num_blocks: int


class Scheduler:
    """Owns every sequence from `add` to its end, and with the pool every block."""

    def __init__(self, pool: BlockPool, limits: Limits, log: CacheLog | None = None) -> None:
        """`log` is told which blocks can be found from now on."""
        self.pool = pool
        self.limits = limits
        self._log = log
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.loading: dict[int, Sequence] = {}
        self.held: dict[int, Sequence] = {}
        self.num_preemptions = 0
        self.num_cache_queries = 0
        self.num_cache_hits = 0

    def occupancy(self) -> Occupancy:
        return Occupancy(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_loading=len(self.loading),
            num_held=len(self.held),
            num_held_blocks=sum(len(sequence.blocks) for sequence in self.held.values()),
            num_free_blocks=self.pool.num_free,
            num_blocks=self.pool.num_blocks,
        )

    @property
    def has_work(self) -> bool:
        """Whether a step could compute something, without an event from outside."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> Step:
        """Choose the next step's work."""
        step = Step()
        decodes = [sequence for sequence in self.running if sequence.num_uncomputed == 1]
        prefills = [sequence for sequence in self.running if sequence.num_uncomputed > 1]
        for sequence in decodes + prefills:
            self._extend(sequence, step)
        while self.waiting and not step.preempted and self._admit(self.waiting[0], step):
            pass
        return step

    def advance(self, work: Iterable[Work], tokens: dict[int, int]) -> list[tuple[Sequence, Finish | None]]:
        """Record that a step ran: `tokens` gives the sampled token by sequence id. Returns who gained a token."""
        gained = []
        for item in work:
            sequence = item.sequence
            sequence.num_computed += item.num_tokens
            self._name_blocks(sequence)
            if item.samples:
                sequence.append(tokens[sequence.seq_id])
                gained.append((sequence, self._end_of(sequence)))
        return gained

    def loaded(self, sequence: Sequence) -> None:
        """The connector delivered the ticket's blocks."""
        del self.loading[sequence.seq_id]
        if sequence.phase is Phase.CLOSING:
            self._finish(sequence)
            return
        assert sequence.ticket is not None
        # Without a token sampled elsewhere the last one is computed again, for its logits.
        sequence.num_computed = min(sequence.ticket.num_tokens, sequence.num_tokens - 1)
        sequence.ticket = None
        sequence.enter(Phase.RUNNING)
        self.running.append(sequence)
        self._name_blocks(sequence)

    def load_failed(self, sequence: Sequence, *, recompute: bool) -> None:
        """The connector gave up; the blocks' content is unknown, so they are freed unnamed."""
        del self.loading[sequence.seq_id]
        sequence.ticket = None
        if sequence.phase is Phase.CLOSING or not recompute:
            self._finish(sequence)
        else:
            self._give_back(sequence)

    def hold_prefix(self, sequence: Sequence) -> bool:
        """Hold what is cached of the sequence's beginning, whole blocks only; False if that is nothing."""
        self._hash_blocks(sequence)
        sequence.blocks = self.pool.find(sequence.block_hashes) if self.limits.prefix_caching else []
        if not sequence.blocks:
            return False
        self.pool.share(sequence.blocks)
        sequence.num_computed = sequence.num_cached = len(sequence.blocks) * self.limits.block_size
        sequence.enter(Phase.HELD)
        self.held[sequence.seq_id] = sequence
        return True

    def suspend(self, sequence: Sequence) -> None:
        """Stop a running sequence between two steps and hold what it has computed."""
        self.running.remove(sequence)
        sequence.enter(Phase.HELD)
        self.held[sequence.seq_id] = sequence

    def abort(self, sequence: Sequence) -> None:
        """End a sequence from outside. A loading one keeps its blocks until the connector's last write."""
        if sequence.phase is Phase.LOADING:
            sequence.enter(Phase.CLOSING)
        elif sequence.phase not in (Phase.CLOSING, Phase.FINISHED):
            self._finish(sequence)

    def _extend(self, sequence: Sequence, step: Step) -> None:
        """Give a running sequence its next tokens, and the blocks they need."""
        num_tokens = min(sequence.num_uncomputed, self._room(sequence, step))
        if num_tokens <= 0 or sequence.phase is not Phase.RUNNING:
            return
        missing = self._blocks_for(sequence.num_computed + num_tokens) - len(sequence.blocks)
        while missing > self.pool.num_free:
            if not self._preempt(step, sequence):
                return
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing, after=sequence.blocks[-1] if sequence.blocks else None)
        step.add(sequence, num_tokens)

    def _room(self, sequence: Sequence, step: Step) -> int:
        """How many tokens of the sequence the step can take."""
        hands_over = step.hands_over or sequence.hold
        room = self.limits.max_num_batched_tokens - step.num_tokens
        if hands_over and sequence.num_uncomputed > 1:
            room = min(room, self.limits.max_handover_tokens - step.num_prefill_tokens)
        if sequence.wants_prompt_logprobs:
            room = min(room, self.limits.max_prompt_logits - step.num_prompt_logits)
        return room

    def _preempt(self, step: Step, needy: Sequence) -> bool:
        """Free the youngest running sequence that the step does not compute; False if that is the needy one."""
        taken = {item.sequence.seq_id for item in step.work}
        victim = next(each for each in reversed(self.running) if each.seq_id not in taken and not each.held_as)
        self.running.remove(victim)
        self._give_back(victim)
        self.num_preemptions += 1
        step.preempted.append(victim)
        return victim is not needy

    def _admit(self, sequence: Sequence, step: Step) -> bool:
        """Take the first waiting sequence if a place, tokens of the budget and all its blocks are there."""
        budget = self._room(sequence, step)
        if len(self.running) + len(self.loading) >= self.limits.max_num_seqs:
            return False
        if budget <= 0 and sequence.ticket is None:
            return False
        shared = self._find_prefix(sequence)
        # A sequence that loads will have one token more by the time it runs: its place is reserved whole.
        arriving = 0 if sequence.ticket is None else 1
        missing = self._blocks_for(sequence.num_tokens + arriving) - len(shared)
        # Beside others, a spare block: an admission that at once preempts somebody is wasted work.
        spare = 1 if self.running else 0
        if missing + spare > self.pool.num_free_after_sharing(shared):
            return False
        self.waiting.popleft()
        self.pool.share(shared)
        sequence.blocks = shared + self.pool.allocate(missing, after=shared[-1] if shared else None)
        self._count_cached(sequence, len(shared) * self.limits.block_size)
        if sequence.ticket is not None:
            self._begin_load(sequence, len(shared), step)
        else:
            sequence.num_computed = len(shared) * self.limits.block_size
            sequence.enter(Phase.RUNNING)
            self.running.append(sequence)
            step.add(sequence, min(sequence.num_uncomputed, budget))
        return True

    def _begin_load(self, sequence: Sequence, num_shared: int, step: Step) -> None:
        assert sequence.ticket is not None
        end = self._blocks_for(sequence.ticket.num_tokens)
        sequence.enter(Phase.LOADING)
        self.loading[sequence.seq_id] = sequence
        step.loads.append(Load(sequence, sequence.blocks[num_shared:end], num_shared))

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Known blocks of the sequence's beginning; at least one token is always left to compute."""
        if not self.limits.prefix_caching or sequence.wants_prompt_logprobs:
            return []
        self._hash_blocks(sequence)
        usable = (sequence.num_tokens - 1) // self.limits.block_size
        if sequence.ticket is not None:
            usable = min(usable, sequence.ticket.num_tokens // self.limits.block_size)
        return self.pool.find(sequence.block_hashes[:usable])

    def _count_cached(self, sequence: Sequence, num_tokens: int) -> None:
        self.num_cache_queries += sequence.num_tokens
        self.num_cache_hits += num_tokens
        if sequence.num_cached is None:
            if sequence.ticket is not None:
                num_tokens = max(num_tokens if sequence.hold else 0, sequence.ticket.cached_tokens)
            sequence.num_cached = min(num_tokens, sequence.num_prompt)

    def _hash_blocks(self, sequence: Sequence) -> None:
        extend_hashes(sequence.block_hashes, sequence.token_ids, self.limits.block_size, sequence.cache_salt)

    def _name_blocks(self, sequence: Sequence) -> None:
        """Make the blocks that are full and computed findable."""
        if not self.limits.prefix_caching:
            return
        self._hash_blocks(sequence)
        stored = range(0)
        for index in range(sequence.num_named, sequence.num_computed // self.limits.block_size):
            if self.pool.name(sequence.blocks[index], sequence.block_hashes[index]):
                stored = range(stored.start if stored else index, index + 1)
            else:
                self._tell(sequence, stored)
                stored = range(0)
        self._tell(sequence, stored)
        sequence.num_named = sequence.num_computed // self.limits.block_size

    def _tell(self, sequence: Sequence, stored: range) -> None:
        """These blocks of the sequence became findable, by their numbers in it."""
        if self._log is None or not stored or sequence.cache_salt:
            return
        size = self.limits.block_size
        self._log.stored(
            sequence.block_hashes[stored.start : stored.stop],
            sequence.block_hashes[stored.start - 1] if stored.start else None,
            sequence.token_ids[stored.start * size : stored.stop * size],
        )

    def _end_of(self, sequence: Sequence) -> Finish | None:
        """Whether the sequence ends with the token it gained, and where its blocks go."""
        finish = finish_of(sequence, self.limits.max_model_len)
        if sequence.hold and (finish is None or finish.reason == "length"):
            self.running.remove(sequence)
            sequence.enter(Phase.HELD)
            self.held[sequence.seq_id] = sequence
            return Finish("length")
        if finish is not None:
            self._finish(sequence)
        return finish

    def _finish(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
        self.held.pop(sequence.seq_id, None)
        self.loading.pop(sequence.seq_id, None)
        sequence.enter(Phase.FINISHED)
        self._drop_blocks(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Put a sequence back to the front of the queue, without blocks."""
        sequence.enter(Phase.WAITING)
        self._drop_blocks(sequence)
        self.waiting.appendleft(sequence)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.num_named = 0

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)
