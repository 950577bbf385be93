"""The sampler against the definitions, written out slowly; and what must not matter: batch-mates."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from fourhop.engine.sampled import Sampled
from fourhop.engine.sampler import LOGPROB_OF_NEVER, SampleRow, sample, uniform
from fourhop.wire.generate import SamplingParams
from fourhop.wire.logprobs import TokenLogprob, TopLogprob

VOCAB_SIZE = 12
EOS = 3
MARGIN = 1e-9
"""Numbers nearer to each other than this may compare either way after rounding."""

ROW = SampleRow(
    SamplingParams(temperature=0.0),
    seed=7,
    position=5,
    prompt_token_ids=[0, 1, 1],
    output_token_ids=[],
    eos_token_ids=frozenset({EOS}),
)


def sample_rows(logits: list[list[float]], rows: list[SampleRow]) -> list[Sampled | None]:
    return sample(torch.tensor(logits, dtype=torch.float32), rows)


def token_of(logits: list[float], params: SamplingParams, output_token_ids: list[int] | None = None) -> int:
    row = dataclasses.replace(ROW, params=params, output_token_ids=output_token_ids or [])
    (sampled,) = sample_rows([logits], [row])
    assert sampled is not None
    return sampled.token_id


def logprob_of(logits: list[float], params: SamplingParams) -> TokenLogprob:
    (sampled,) = sample_rows([logits], [dataclasses.replace(ROW, params=params)])
    assert sampled is not None and sampled.logprob is not None
    return sampled.logprob


# The reference


class TooClose(Exception):
    """Two numbers are so near that rounding decides which is larger: the definitions do not say what must come out."""


def clear(value: float, boundary: float) -> None:
    if abs(value - boundary) <= MARGIN:
        raise TooClose


def reference_scores(logits: list[float], row: SampleRow) -> list[float]:
    """Every parameter's definition, one token at a time."""
    params, output = row.params, list(row.output_token_ids)
    scores = []
    for token, logit in enumerate(logits):
        score = logit
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            score = -math.inf
        if len(output) < params.min_tokens and (token in row.eos_token_ids or token in params.stop_token_ids):
            score = -math.inf
        score += (params.logit_bias or {}).get(str(token), 0.0)
        if token in output or token in row.prompt_token_ids:
            score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        score -= params.frequency_penalty * output.count(token)
        score -= params.presence_penalty * (token in output)
        scores.append(score)
    return scores


def reference_kept(scores: list[float], params: SamplingParams) -> dict[int, float]:
    """The tokens that may be drawn, by ascending id, with their unnormalised probabilities."""
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    highest = scores[order[0]]
    weights = {token: math.exp((scores[token] - highest) / params.temperature) for token in order}
    for weight in weights.values():
        if params.min_p > 0.0 and weight < 1.0:
            clear(weight, params.min_p)
    order = [token for token in order if weights[token] >= params.min_p]
    order = order[: params.top_k] if params.top_k > 0 else order
    total = math.fsum(weights[token] for token in order)
    nucleus: list[int] = []
    likelier = 0.0
    for token in order:
        if params.top_p < 1.0:
            clear(likelier, params.top_p * total)
            if likelier > params.top_p * total:
                break
        nucleus.append(token)
        likelier += weights[token]
    return {token: weights[token] for token in sorted(nucleus)}


def reference_token(logits: list[float], row: SampleRow) -> int:
    scores = reference_scores(logits, row)
    if row.params.temperature == 0.0:
        return scores.index(max(scores))
    kept = reference_kept(scores, row.params)
    target = uniform(row.seed, row.position) * math.fsum(kept.values())
    mass = 0.0
    for token, weight in kept.items():
        mass += weight
        clear(mass, target)
        if mass > target:
            return token
    raise AssertionError("the point is beyond the whole mass")


# Strategies

tokens = st.integers(0, VOCAB_SIZE - 1)
vectors = st.lists(
    st.floats(-8, 8, width=32) | st.sampled_from([0.0, 1.0, -math.inf]), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE
)
parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.9]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, -1, 1, 2, 5, VOCAB_SIZE, 100]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]) | st.floats(0.001, 0.999),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(tokens, max_size=2),
    logit_bias=st.none() | st.dictionaries(tokens.map(str), st.floats(-100, 100, width=32), max_size=3),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=1, max_size=8),
    logprobs=st.none() | st.integers(0, 5),
)
sample_row = st.builds(
    SampleRow,
    params=parameters,
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**20),
    prompt_token_ids=st.lists(tokens, max_size=6),
    output_token_ids=st.lists(tokens, max_size=6),
    eos_token_ids=st.frozensets(tokens, max_size=2),
)


@given(vectors, sample_row)
def test_token_is_that_of_the_definitions(logits: list[float], row: SampleRow) -> None:
    (sampled,) = sample_rows([logits], [row])
    if max(reference_scores(logits, row)) == -math.inf:
        assert sampled is None
        return
    try:
        expected = reference_token(logits, row)
    except TooClose:
        reject()
    assert sampled is not None
    assert sampled.token_id == expected


@given(st.lists(st.tuples(vectors, sample_row), min_size=2, max_size=5))
def test_rows_do_not_see_one_another(batch: list[tuple[list[float], SampleRow]]) -> None:
    together = sample_rows([logits for logits, _ in batch], [row for _, row in batch])
    assert together == [sample_rows([logits], [row])[0] for logits, row in batch]


def test_logits_are_left_unchanged() -> None:
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    params = SamplingParams(logit_bias={"1": 5.0}, repetition_penalty=2.0, min_tokens=1, logprobs=3)
    sample(logits, [dataclasses.replace(ROW, params=params)] * 2)
    assert torch.equal(logits, before)


def test_greedy_takes_the_first_of_equals_on_every_path() -> None:
    logits = [0.0, 2.0, 2.0, 1.0]
    assert token_of(logits, SamplingParams(temperature=0.0)) == 1
    assert token_of(logits, SamplingParams(temperature=0.0, logprobs=1)) == 1
    assert token_of(logits, SamplingParams(top_k=1)) == 1
    assert token_of(logits, SamplingParams(top_p=1e-6)) == 1


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5)])
def test_a_row_of_nan_has_no_token_and_its_mates_do(params: SamplingParams) -> None:
    row = dataclasses.replace(ROW, params=params)
    broken, sound = sample_rows([[0.0, math.nan, 1.0, 0.0], [0.0, 9.0, 0.0, -99.0]], [row, row])
    assert broken is None
    assert sound == Sampled(1)


def test_parameters_that_forbid_every_token_give_none() -> None:
    params = SamplingParams(allowed_token_ids=[EOS], min_tokens=1)
    assert sample_rows([[0.0] * 4], [dataclasses.replace(ROW, params=params)]) == [None]


# Parameters


def test_min_tokens_holds_back_eos_and_stop_tokens_until_they_are_due() -> None:
    logits = [0.0, 1.0, 5.0, 9.0]
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[2])
    assert token_of(logits, params, []) == 1
    assert token_of(logits, params, [0]) == 1
    assert token_of(logits, params, [0, 0]) == EOS


def test_repetition_penalty_counts_prompt_and_output() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert token_of([0.0, 5.0, 3.0, 0.0], params) == 2  # 1 is in the prompt
    assert token_of([0.0, 5.0, 3.0, 2.0], params, [2]) == 1
    assert token_of([-1.0, -1.5, -1.9, -9.0], params) == 2  # negative scores grow more negative


def test_presence_and_frequency_penalties_count_output_only() -> None:
    logits = [0.0, 2.0, 1.5, 0.0]
    assert token_of(logits, SamplingParams(temperature=0.0, presence_penalty=1.0)) == 1
    assert token_of(logits, SamplingParams(temperature=0.0, presence_penalty=1.0), [1]) == 2
    assert token_of(logits, SamplingParams(temperature=0.0, frequency_penalty=0.3), [1]) == 1
    assert token_of(logits, SamplingParams(temperature=0.0, frequency_penalty=0.3), [1, 1]) == 2


def test_ignore_eos_does_not_forbid_eos() -> None:
    assert token_of([0.0, 0.0, 0.0, 9.0], SamplingParams(temperature=0.0, ignore_eos=True)) == EOS


# Log-probabilities


@given(st.lists(st.floats(-30, 30, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE))
def test_logprobs_of_all_tokens_sum_to_one_in_order(logits: list[float]) -> None:
    top = logprob_of(logits, SamplingParams(logprobs=VOCAB_SIZE)).top_logprobs
    assert math.fsum(math.exp(each.logprob) for each in top) == pytest.approx(1.0)
    assert [each.rank for each in top] == list(range(1, VOCAB_SIZE + 1))
    assert [each.token_id for each in top] == sorted(range(VOCAB_SIZE), key=lambda token: (-logits[token], token))


@given(st.lists(st.floats(-30, 30, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE), sample_row)
def test_logprobs_are_the_models_own_whatever_the_parameters(logits: list[float], row: SampleRow) -> None:
    params = msgspec.structs.replace(row.params, logprobs=VOCAB_SIZE)
    (sampled,) = sample_rows([logits], [dataclasses.replace(row, params=params)])
    assume(sampled is not None)
    assert sampled is not None and sampled.logprob is not None
    assert sampled.logprob.top_logprobs == logprob_of(logits, SamplingParams(logprobs=VOCAB_SIZE)).top_logprobs
    expected = next(each for each in sampled.logprob.top_logprobs if each.token_id == sampled.token_id)
    found = sampled.logprob
    assert (found.token_id, found.logprob, found.rank) == (expected.token_id, expected.logprob, expected.rank)


def test_logprobs_match_torch() -> None:
    logits = [0.5, -2.0, 3.0, 1.0]
    top = logprob_of(logits, SamplingParams(logprobs=4)).top_logprobs
    expected = torch.tensor(logits).log_softmax(0)
    assert [each.logprob for each in top] == pytest.approx([float(expected[each.token_id]) for each in top])


def test_logprobs_zero_asks_for_the_sampled_token_alone() -> None:
    found = logprob_of([0.0, 3.0, 0.0, 0.0], SamplingParams(temperature=0.0, logprobs=0))
    assert (found.token_id, found.rank, found.top_logprobs) == (1, 1, [])


def test_minus_infinity_is_written_as_minus_9999_without_a_rank() -> None:
    top = logprob_of([0.0, -math.inf, -1.0, -1.0], SamplingParams(temperature=0.0, logprobs=4)).top_logprobs
    assert top[-1] == TopLogprob(1, LOGPROB_OF_NEVER, None)


# The random source


def test_uniform_is_a_fixed_function_of_seed_and_position() -> None:
    """Philox-4x64-10 as numpy computes it; another value here breaks every seed that a user has kept."""
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1)] == [
        0.011546754286331562,
        0.3035680343067586,
        0.5023796042735054,
    ]
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)


def test_uniform_fills_the_interval_evenly_along_seeds_and_along_positions() -> None:
    num_bins, num_points = 20, 4000
    for points in (
        [uniform(seed, 17) for seed in range(num_points)],
        [uniform(17, position) for position in range(num_points)],
    ):
        assert min(points) >= 0.0 and max(points) < 1.0
        counts = np.histogram(points, bins=num_bins, range=(0.0, 1.0))[0]
        assert chi_square(counts, np.full(num_bins, num_points / num_bins)) < 43.8  # 19 degrees, p = 0.001


def test_neighbouring_positions_are_uncorrelated() -> None:
    points = np.array([uniform(3, position) for position in range(4000)])
    assert abs(float(np.corrcoef(points[:-1], points[1:])[0, 1])) < 0.05


def test_tokens_are_drawn_as_often_as_their_probabilities_say() -> None:
    logits = [0.0, 1.0, 2.0, -1.0, 0.5]
    num_draws = 4000
    rows = [dataclasses.replace(ROW, params=SamplingParams(temperature=0.8), seed=seed) for seed in range(num_draws)]
    sampled = sample_rows([logits] * num_draws, rows)
    counts = np.bincount([each.token_id for each in sampled if each is not None], minlength=len(logits))
    expected = num_draws * torch.softmax(torch.tensor(logits) / 0.8, 0).numpy()
    assert chi_square(counts, expected) < 18.5  # 4 degrees of freedom, p = 0.001


@pytest.mark.parametrize(("point", "token"), [(0.0, 1), (1.0 - 2.0**-53, 3)])
def test_the_ends_of_the_interval_never_fall_on_a_forbidden_token(
    monkeypatch: pytest.MonkeyPatch, point: float, token: int
) -> None:
    monkeypatch.setattr("fourhop.engine.sampler.uniform", lambda seed, position: point)
    assert token_of([9.0, 0.1, 0.2, 0.3, 9.0], SamplingParams(allowed_token_ids=[1, 2, 3])) == token


def chi_square(counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> float:
    return float((((counts - expected) ** 2) / expected).sum())


# A real vocabulary's size


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("params", [SamplingParams(top_p=0.9), SamplingParams(top_k=300, top_p=0.99, min_p=1e-4)])
def test_large_vocabularies_follow_the_definitions_too(scale: float, params: SamplingParams) -> None:
    """The nucleus is wider than the sampler's first guess when the distribution is flat."""
    logits = (scale * np.random.default_rng(0).standard_normal(20_000)).astype(np.float32).tolist()
    row = dataclasses.replace(ROW, params=params)
    (sampled,) = sample_rows([logits], [row])
    assert sampled is not None
    assert sampled.token_id == reference_token(logits, row)
