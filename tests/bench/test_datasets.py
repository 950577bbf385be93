"""Prompts that are drawn: lengths are exact, nothing is shared that should not be, everything follows from the seed."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from fakes.vocabulary import LetterVocabulary
from fourhop.bench.dataset_config import DatasetConfig
from fourhop.bench.datasets import multi_turn_jobs, prefix_repetition_jobs, random_jobs
from fourhop.bench.workload import Job, text_of, warm_up

VOCABULARY = LetterVocabulary()
SEEDS = st.integers(0, 1000)


def first(num: int, config: DatasetConfig, seed: int = 0) -> list[Job]:
    return list(islice(random_jobs(config, VOCABULARY, seed), num))


@given(st.integers(1, 300), st.integers(1, 50), st.integers(0, 40), SEEDS)
def test_random_prompts_have_exactly_the_lengths_asked_for(
    num_input: int, num_output: int, num_prefix: int, seed: int
) -> None:
    config = DatasetConfig(random_input_len=num_input, random_output_len=num_output, random_prefix_len=num_prefix)
    jobs = first(4, config, seed)
    assert [len(job.turns[0].ids) for job in jobs] == [num_prefix + num_input] * 4
    assert [job.turns[0].num_output for job in jobs] == [num_output] * 4
    assert len({tuple(job.turns[0].ids[:num_prefix]) for job in jobs}) == 1
    assert all(id in VOCABULARY.ids for job in jobs for id in job.turns[0].ids)


@given(st.integers(1, 200), st.floats(0, 0.99), SEEDS)
def test_a_range_ratio_bounds_the_lengths(length: int, ratio: float, seed: int) -> None:
    config = DatasetConfig(random_input_len=length, random_output_len=length, random_range_ratio=ratio)
    for job in first(20, config, seed):
        for drawn in (len(job.turns[0].ids), job.turns[0].num_output):
            assert max(1, int(length * (1 - ratio))) <= drawn <= -int(-length * (1 + ratio) // 1)


@given(SEEDS)
def test_a_seed_decides_every_prompt_and_another_one_shares_none(seed: int) -> None:
    config = DatasetConfig(random_input_len=32)
    assert first(5, config, seed) == first(5, config, seed)
    beginnings = [tuple(job.turns[0].ids[:16]) for other in (seed, seed + 1) for job in first(5, config, other)]
    assert len(set(beginnings)) == 10


@given(SEEDS, st.integers(0, 12))
def test_warm_up_prompts_are_as_long_and_not_the_same(seed: int, num: int) -> None:
    """Case 91."""
    jobs = first(5, DatasetConfig(random_input_len=32, random_range_ratio=0.5), seed)
    warm = warm_up(jobs, VOCABULARY, seed, num)
    assert [len(job.turns[0].ids) for job in warm] == [len(jobs[place % 5].turns[0].ids) for place in range(num)]
    measured = {tuple(job.turns[0].ids[:16]) for job in jobs}
    assert len(measured | {tuple(job.turns[0].ids[:16]) for job in warm}) == 5 + num


def test_prefix_and_suffix_are_both_exact() -> None:
    """Case 92: 64 and 64, the prefix shared, the suffix not."""
    config = DatasetConfig(
        dataset_name="prefix_repetition",
        prefix_repetition_prefix_len=64,
        prefix_repetition_suffix_len=64,
        prefix_repetition_num_prefixes=3,
    )
    prompts = [job.turns[0].ids for job in islice(prefix_repetition_jobs(config, VOCABULARY, 1), 9)]
    assert {len(ids) for ids in prompts} == {128}
    assert len({tuple(ids[:64]) for ids in prompts}) == 3
    assert len({tuple(ids[64:]) for ids in prompts}) == 9


def test_conversations_have_a_long_first_turn_and_short_later_ones() -> None:
    config = DatasetConfig(dataset_name="multi_turn", random_input_len=50, turn_input_len=7, num_turns=3)
    (job,) = islice(multi_turn_jobs(config, VOCABULARY, 1), 1)
    assert [len(turn.ids) for turn in job.turns] == [50, 7, 7]


@given(st.lists(st.sampled_from(range(51)), min_size=1, max_size=60))
def test_a_text_has_as_many_tokens_as_the_ids_though_encoding_again_merges_them(ids: list[int]) -> None:
    """Case 92: only where a text must be sent (chat); here it always settles, and it is never further off than that."""
    text = text_of(ids, VOCABULARY, "key")
    settled = len(VOCABULARY.encode(text))
    assert abs(settled - len(ids)) <= abs(len(VOCABULARY.encode(VOCABULARY.decode(ids))) - len(ids))
    assert abs(settled - len(ids)) <= 1
