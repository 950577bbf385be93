"""The scheduler alone, with a model that is a function of the tokens: no tensors, no threads, no clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourhop.engine.blocks import BlockPool
from fourhop.engine.scheduler import Scheduler
from fourhop.engine.sequence import Finish, Phase, Sequence
from fourhop.engine.step import Limits, Step
from fourhop.wire.generate import SamplingParams
from fourhop.wire.logprobs import PromptLogprob
from fourhop.wire.ticket import KVTicket, hash_tokens

EOS = 7


def next_token(token_ids: list[int]) -> int:
    """The toy model: any fixed function of all tokens will do."""
    return (sum(token_ids) * 31 + len(token_ids)) % 97 + 10


def make_scheduler(
    num_blocks: int = 16,
    block_size: int = 4,
    budget: int = 16,
    num_seqs: int = 8,
    caching: bool = True,
    handover_budget: int = 16,
) -> Scheduler:
    limits = Limits(
        block_size,
        budget,
        num_seqs,
        max_model_len=num_blocks * block_size,
        prefix_caching=caching,
        max_handover_tokens=min(budget, handover_budget),
    )
    return Scheduler(BlockPool(num_blocks), limits)


def make_sequence(seq_id: int, prompt: list[int], max_tokens: int = 4, **options: object) -> Sequence:
    return Sequence(
        seq_id,
        f"request {seq_id}",
        prompt,
        SamplingParams(),
        seed=0,
        max_tokens=max_tokens,
        eos_token_ids=frozenset({EOS}),
        **options,  # type: ignore[arg-type]
    )


def run_step(scheduler: Scheduler) -> tuple[Step, dict[int, Finish]]:
    step = scheduler.schedule()
    assert step.num_tokens <= scheduler.limits.max_num_batched_tokens
    assert step.num_tokens == sum(item.num_tokens for item in step.work)
    for item in step.work:
        capacity = len(item.sequence.blocks) * scheduler.limits.block_size
        assert item.start + item.num_tokens <= capacity
    tokens = {item.sequence.seq_id: next_token(item.sequence.token_ids) for item in step.work if item.samples}
    ended = {sequence.seq_id: end for sequence, end in scheduler.advance(step.work, tokens) if end is not None}
    scheduler.pool.check()
    return step, ended


def run_all(scheduler: Scheduler, max_steps: int = 500) -> dict[int, Finish]:
    ended: dict[int, Finish] = {}
    for _ in range(max_steps):
        if not scheduler.has_work:
            return ended
        ended |= run_step(scheduler)[1]
    raise AssertionError("no progress")


def expected_output(prompt: list[int], max_tokens: int, window: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < window:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


prompts = st.lists(st.integers(10, 20), min_size=1, max_size=30)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(prompts, st.integers(1, 12)), min_size=1, max_size=8),
    st.integers(11, 24),
    st.integers(1, 40),
    st.booleans(),
)
def test_every_sequence_ends_with_its_own_tokens(
    requests: list[tuple[list[int], int]], num_blocks: int, budget: int, caching: bool
) -> None:
    """Whatever the pool, the budget, the neighbours and the preemptions."""
    scheduler = make_scheduler(num_blocks=num_blocks, budget=budget, caching=caching)
    sequences = [make_sequence(index, prompt, limit) for index, (prompt, limit) in enumerate(requests)]
    for sequence in sequences:
        scheduler.add(sequence)
    ended = run_all(scheduler)
    assert set(ended) == {sequence.seq_id for sequence in sequences}
    for sequence, (prompt, limit) in zip(sequences, requests, strict=True):
        assert sequence.output_token_ids == expected_output(prompt, limit, scheduler.limits.max_model_len)
        assert sequence.phase is Phase.FINISHED
    assert scheduler.pool.num_free == num_blocks


def test_decodes_come_before_prefills() -> None:
    scheduler = make_scheduler(num_blocks=64, budget=8)
    scheduler.add(make_sequence(0, [11, 12]))
    run_step(scheduler)
    scheduler.add(make_sequence(1, list(range(10, 40))))
    step, _ = run_step(scheduler)
    assert [(item.sequence.seq_id, item.num_tokens) for item in step.work] == [(0, 1), (1, 7)]


def test_a_prompt_is_prefilled_in_chunks_and_sampled_once() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_sequence(0, list(range(10, 30)), max_tokens=1))
    chunks = [run_step(scheduler)[0].work[0] for _ in range(3)]
    assert [(item.start, item.num_tokens, item.samples) for item in chunks] == [
        (0, 8, False),
        (8, 8, False),
        (16, 4, True),
    ]


def test_a_step_for_another_engine_is_small_whoever_else_waits() -> None:
    """Prompts of 20 and 10 tokens, 8 a step: they end after 20 and 30 tokens, as they would one after the other."""
    scheduler = make_scheduler(handover_budget=8)
    for seq_id, length, hold in ((0, 20, True), (1, 10, True), (2, 16, False)):
        scheduler.add(make_sequence(seq_id, list(range(100 * seq_id, 100 * seq_id + length)), max_tokens=1, hold=hold))
    steps = []
    while scheduler.has_work:
        step, _ = run_step(scheduler)
        steps.append({item.sequence.seq_id: item.num_tokens for item in step.work})
    assert steps == [{0: 8}, {0: 8}, {0: 4, 1: 4}, {1: 6, 2: 2}, {2: 14}]


def test_a_prompt_for_another_engine_goes_on_beside_many_decodes() -> None:
    scheduler = make_scheduler(num_blocks=32, budget=16, num_seqs=8, handover_budget=2)
    for seq_id in range(4):
        scheduler.add(make_sequence(seq_id, [10 + seq_id], max_tokens=30))
    run_step(scheduler)
    scheduler.add(make_sequence(9, list(range(50, 58)), max_tokens=1, hold=True))
    sizes = []
    for _ in range(4):
        step, _ = run_step(scheduler)
        assert len(step.work) == 5
        sizes += [item.num_tokens for item in step.work if item.sequence.seq_id == 9]
    assert sizes == [2, 2, 2, 2]


def test_a_prompt_is_admitted_whole_or_not_at_all() -> None:
    """Two prompts of 6 blocks and a pool of 8: both finish, one after the other, and neither waits half-admitted."""
    scheduler = make_scheduler(num_blocks=8, budget=8)
    for seq_id in range(2):
        scheduler.add(make_sequence(seq_id, [11 + seq_id] * 24, max_tokens=2))
    run_step(scheduler)
    assert (len(scheduler.running), len(scheduler.waiting)) == (1, 1)
    assert scheduler.waiting[0].blocks == []
    assert set(run_all(scheduler)) == {0, 1}
    assert scheduler.num_preemptions == 0


def test_the_youngest_is_preempted_and_the_oldest_goes_on() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2, budget=16, caching=False)
    scheduler.add(make_sequence(0, [11], max_tokens=6))
    scheduler.add(make_sequence(1, [12], max_tokens=6))
    ended = run_all(scheduler)
    assert scheduler.num_preemptions > 0
    assert list(ended) == [0, 1]


@pytest.mark.parametrize(("length", "reused"), [(16, 8), (17, 16), (15, 8)])
def test_a_known_prompt_leaves_at_least_one_token_to_compute(length: int, reused: int) -> None:
    scheduler = make_scheduler(block_size=8, budget=64)
    tokens = list(range(10, 27))
    scheduler.add(make_sequence(0, tokens, max_tokens=1))
    run_all(scheduler)
    again = make_sequence(1, tokens[:length], max_tokens=1)
    scheduler.add(again)
    run_all(scheduler)
    assert again.num_cached == reused
    assert again.output_token_ids == expected_output(tokens[:length], 1, 64)


def test_another_salt_finds_nothing() -> None:
    scheduler = make_scheduler()
    for seq_id, salt in enumerate(("a", "b", "a")):
        sequence = make_sequence(seq_id, list(range(10, 22)), max_tokens=1, cache_salt=salt)
        scheduler.add(sequence)
        run_all(scheduler)
        assert sequence.num_cached == (8 if seq_id == 2 else 0)


def test_a_hold_keeps_its_blocks_until_it_is_ended() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(0, list(range(10, 20)), hold=True)
    scheduler.add(sequence)
    assert run_all(scheduler) == {0: Finish("length")}
    assert sequence.phase is Phase.HELD
    assert sequence.num_computed == 10
    assert scheduler.occupancy().num_held_blocks == 3
    scheduler.abort(sequence)
    assert scheduler.pool.num_free == 16


def test_a_hold_that_ends_by_itself_holds_nothing() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(0, [11], hold=True)
    scheduler.add(sequence)
    step = scheduler.schedule()
    assert scheduler.advance(step.work, {0: EOS}) == [(sequence, Finish("stop"))]
    assert scheduler.pool.num_free == 16


def make_ticket(token_ids: list[int], block_size: int = 4) -> KVTicket:
    return KVTicket(
        ticket_id="t",
        connector="local",
        epoch="e",
        fingerprint="f",
        token_hash=hash_tokens(token_ids),
        expires_at_s=1.0,
        engine_id="p",
        request_id="r",
        host="",
        port=0,
        num_tokens=len(token_ids),
        block_ids=[list(range(-(-len(token_ids) // block_size)))],
        cached_tokens=4,
    )


def loading(scheduler: Scheduler, prompt: list[int], output: list[int], seq_id: int = 9) -> tuple[Sequence, Step]:
    sequence = make_sequence(seq_id, prompt, ticket=make_ticket(prompt), output_token_ids=output)
    scheduler.add(sequence)
    return sequence, scheduler.schedule()


def test_a_ticket_is_loaded_then_decoded() -> None:
    scheduler = make_scheduler()
    prompt = list(range(10, 20))
    sequence, step = loading(scheduler, prompt, [next_token(prompt)])
    assert [(len(load.block_ids), load.skip_blocks) for load in step.loads] == [(3, 0)]
    assert not step.work
    scheduler.loaded(sequence)
    step, _ = run_step(scheduler)
    assert [(item.start, item.num_tokens) for item in step.work] == [(10, 1)]
    run_all(scheduler)
    assert sequence.output_token_ids == expected_output(prompt, 4, 64)
    assert sequence.num_cached == 4


@pytest.mark.parametrize(("known", "skip", "pulled"), [(0, 0, 4), (8, 2, 2), (16, 4, 0)])
def test_only_missing_blocks_are_pulled(known: int, skip: int, pulled: int) -> None:
    scheduler = make_scheduler()
    prompt = list(range(10, 26))
    if known:
        scheduler.add(make_sequence(0, [*prompt[:known], 99], max_tokens=1))
        run_all(scheduler)
    sequence, step = loading(scheduler, prompt, [next_token(prompt)])
    (load,) = step.loads
    assert (load.skip_blocks, len(load.block_ids)) == (skip, pulled)
    assert load.block_ids == sequence.blocks[skip:4]


def test_a_loading_sequence_keeps_its_blocks_until_the_last_write() -> None:
    scheduler = make_scheduler(num_blocks=8)
    sequence, _ = loading(scheduler, list(range(10, 26)), [50])
    scheduler.abort(sequence)
    assert sequence.phase is Phase.CLOSING
    needy = make_sequence(1, [30] * 20)
    scheduler.add(needy)
    assert not scheduler.schedule().work, "the blocks that are being written to are nobody else's"
    scheduler.loaded(sequence)
    assert not sequence.blocks
    assert scheduler.schedule().work[0].sequence is needy


@pytest.mark.parametrize("recompute", [True, False])
def test_a_failed_load_recomputes_or_ends(recompute: bool) -> None:
    scheduler = make_scheduler()
    prompt = list(range(10, 20))
    sequence, _ = loading(scheduler, prompt, [next_token(prompt)])
    scheduler.load_failed(sequence, recompute=recompute)
    run_all(scheduler)
    assert sequence.phase is Phase.FINISHED
    assert sequence.output_token_ids == expected_output(prompt, 4 if recompute else 1, 64)
    assert scheduler.pool.num_free == 16


@settings(max_examples=60)
@given(st.lists(st.tuples(prompts, st.booleans(), st.integers(0, 6)), min_size=1, max_size=6))
def test_aborts_at_any_step_free_everything(requests: list[tuple[list[int], bool, int]]) -> None:
    scheduler = make_scheduler(num_blocks=12, budget=8)
    sequences = [make_sequence(index, prompt, hold=hold) for index, (prompt, hold, _) in enumerate(requests)]
    for sequence in sequences:
        scheduler.add(sequence)
    for turn in range(7):
        for sequence, (_, _, when) in zip(sequences, requests, strict=True):
            if turn >= when:
                scheduler.abort(sequence)
        run_step(scheduler)
    assert scheduler.pool.num_free == 12
    assert not scheduler.held and not scheduler.running and not scheduler.waiting


def test_an_illegal_step_names_both_phases() -> None:
    sequence = make_sequence(0, [1])
    with pytest.raises(RuntimeError, match="from waiting to closing"):
        sequence.enter(Phase.CLOSING)


@settings(max_examples=60)
@given(
    asked=st.lists(st.tuples(st.lists(st.integers(10, 12), min_size=1, max_size=30), st.booleans()), min_size=1),
    num_blocks=st.integers(9, 24),
    budget=st.integers(1, 16),
    max_rows=st.integers(1, 9),
)
def test_prompts_that_are_looked_at_are_computed_whole_and_in_steps_of_bounded_logits(
    asked: list[tuple[list[int], bool]], num_blocks: int, budget: int, max_rows: int
) -> None:
    """Beside others with the same beginnings, with preemption: every token's entry is there with the first token."""
    limits = replace(make_scheduler(num_blocks=num_blocks, budget=budget).limits, max_prompt_logits=max_rows)
    scheduler = Scheduler(BlockPool(num_blocks), limits)
    sequences = []
    for seq_id, (prompt, looks) in enumerate(asked):
        sequence = make_sequence(seq_id, prompt)
        sequence.params = SamplingParams(prompt_logprobs=0 if looks else None)
        sequences.append(sequence)
        scheduler.add(sequence)
    told: dict[int, object] = {}
    for _ in range(3000):
        if not scheduler.has_work:
            break
        step = scheduler.schedule()
        assert sum(item.num_prompt_logits for item in step.work) <= max_rows
        for item in step.work:
            following = item.sequence.token_ids[item.start + 1 : item.start + 1 + item.num_prompt_logits]
            if item.num_prompt_logits:
                item.sequence.note_prompt_logprobs(item.start, [{token: PromptLogprob(0.0)} for token in following])
        tokens = {item.sequence.seq_id: next_token(item.sequence.token_ids) for item in step.work if item.samples}
        for sequence, _ in scheduler.advance(step.work, tokens):
            taken = sequence.take_prompt_logprobs()
            assert sequence.seq_id not in told or taken is None
            told.setdefault(sequence.seq_id, taken)
        scheduler.pool.check()
    for sequence, (prompt, looks) in zip(sequences, asked, strict=True):
        expected = [None, *({token: PromptLogprob(0.0)} for token in prompt[1:])] if looks else None
        assert told[sequence.seq_id] == expected
        assert not looks or sequence.num_cached == 0
