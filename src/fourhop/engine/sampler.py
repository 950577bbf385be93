"""From logits to tokens: a pure function of logits, parameters, seed and position.

Order of operations and meaning of the parameters are vLLM's (`vllm/v1/sample/sampler.py`, docstring of `Sampler`): the
grammar's tokens, allowed_token_ids, min_tokens, logit_bias, penalties, then greedy, or temperature, min_p, top_k, top_p
and one draw.
Log-probabilities are the model's own, before any of these ("raw_logprobs").

Among equal values the lower token id is the likelier one. Rows never see one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fourhop.engine.sampled import Sampled
from fourhop.wire.generate import SamplingParams
from fourhop.wire.logprobs import PromptLogprob, TokenLogprob, TopLogprob

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature the likeliest token is taken (vLLM's `_SAMPLING_EPS`)."""

LOGPROB_OF_NEVER = -9999.0
"""How minus infinity is written on the wire; its rank is None."""

NUCLEUS_GUESS = 256
"""Tokens that are ordered first in search of the nucleus; where they are too few, 16 times as many, and so on."""

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampleRow:
    """What chooses one token.

    Attributes:
        params: Checked by the caller: ids are in the vocabulary, `allowed_token_ids` is not empty.
        seed: The choice's seed; any integer, taken modulo 2**64.
        position: Index of the new token in the sequence, prompt included.
        prompt_token_ids: Counted by repetition_penalty.
        output_token_ids: Counted by all three penalties and by min_tokens.
        eos_token_ids: Not chosen before min_tokens, like stop_token_ids.
        allowed: The tokens that a grammar allows, bool [vocab_size]; None for all.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    eos_token_ids: frozenset[int]
    allowed: npt.NDArray[np.bool_] | None = None


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled | None]:
    """One token for each row of `logits`, float32 [num_rows, vocab_size], which is left unchanged.

    A row is None when no token can be chosen: its logits hold NaN, or its parameters forbid every token.
    """
    plain = [_is_plain(row) for row in rows]
    likeliest = _argmax(logits) if any(plain) else []
    return [
        _sampled(likeliest[index]) if plain[index] else _sample_row(logits[index].cpu().numpy(), row)
        for index, row in enumerate(rows)
    ]


def prompt_logprobs(
    logits: torch.Tensor, next_token_ids: Sequence[int], num_top: int
) -> list[dict[int, PromptLogprob]]:
    """How likely each prompt token was after the ones before it, and which `num_top` tokens were the likeliest.

    `logits`, float32 [num_rows, vocab_size], are those before each of `next_token_ids`.
    """
    rows = logits.cpu().numpy()
    return [
        _as_prompt(_logprob(row.astype(np.float64), token_id, num_top))
        for row, token_id in zip(rows, next_token_ids, strict=True)
    ]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a function of seed and position alone: equal in every process and on every platform.

    The first 53 bits of Philox-4x64-10 under key `seed` at counter `position`. Source: Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3" (SC11), in numpy's implementation, whose streams do not change (NEP 19).
    """
    bits = np.random.Philox(key=seed % 2**64, counter=position).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def _is_plain(row: SampleRow) -> bool:
    """True if the row takes its likeliest token and needs nothing else."""
    params = row.params
    return (
        row.allowed is None
        and params.temperature < GREEDY_TEMPERATURE
        and params.logprobs is None
        and params.allowed_token_ids is None
        and not params.logit_bias
        and len(row.output_token_ids) >= params.min_tokens
        and not _has_penalties(params)
    )


def _has_penalties(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


def _argmax(logits: torch.Tensor) -> list[int | None]:
    """Each row's likeliest token, None where the logits hold NaN."""
    if logits.device.type == "cpu":
        # numpy's argmax is ten times as quick as torch's on one core; both take the first of equals, and NaN over all.
        array = logits.numpy()
        ids = array.argmax(axis=1)
        values = np.take_along_axis(array, ids[:, None], axis=1)[:, 0]
        return [None if np.isnan(value) else int(token_id) for token_id, value in zip(ids, values, strict=True)]
    best = logits.max(dim=1)
    pairs = zip(best.indices.tolist(), best.values.isnan().tolist(), strict=True)
    return [None if is_nan else token_id for token_id, is_nan in pairs]


def _sampled(token_id: int | None) -> Sampled | None:
    return None if token_id is None else Sampled(token_id)


def _sample_row(logits: npt.NDArray[np.float32], row: SampleRow) -> Sampled | None:
    raw = logits.astype(np.float64)
    scores = _adjust(raw, row)
    highest = int(scores.argmax())
    if not np.isfinite(scores[highest]):
        return None
    token_id = highest
    if row.params.temperature >= GREEDY_TEMPERATURE:
        token_id = _draw(scores - scores[highest], row.params, uniform(row.seed, row.position))
    if row.params.logprobs is None:
        return Sampled(token_id)
    return Sampled(token_id, _logprob(raw, token_id, row.params.logprobs))


def _adjust(raw: Floats, row: SampleRow) -> Floats:
    """The scores to choose from: minus infinity for forbidden tokens, biased and penalised. A copy of `raw`."""
    params = row.params
    scores = raw.copy()
    if params.allowed_token_ids is not None:
        scores = np.full_like(raw, -np.inf)
        scores[params.allowed_token_ids] = raw[params.allowed_token_ids]
    if row.allowed is not None:
        scores[~row.allowed] = -np.inf
    if len(row.output_token_ids) < params.min_tokens:
        scores[[*row.eos_token_ids, *params.stop_token_ids]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        scores[int(token)] += bias
    if _has_penalties(params):
        _penalise(scores, row)
    return scores


def _penalise(scores: Floats, row: SampleRow) -> None:
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.asarray([*row.prompt_token_ids, *row.output_token_ids], dtype=np.int64))
        scores[seen] *= np.where(scores[seen] > 0, 1.0 / params.repetition_penalty, params.repetition_penalty)
    output, counts = np.unique(np.asarray(row.output_token_ids, dtype=np.int64), return_counts=True)
    scores[output] -= params.frequency_penalty * counts + params.presence_penalty


def _draw(scores: Floats, params: SamplingParams, point: float) -> int:
    """The token at `point` in [0, 1) of the cumulative distribution over ascending ids; the highest score is 0."""
    weights = np.exp(scores / params.temperature)
    ids = np.arange(len(weights))
    if 0 < params.top_k < len(weights):  # before min_p, which commutes with it, since both keep the likeliest
        ids = np.sort(_largest(weights, params.top_k))
        weights = weights[ids]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= params.min_p)
        ids, weights = ids[kept], weights[kept]
    if params.top_p < 1.0:
        kept = np.sort(_nucleus(weights, params.top_p))
        ids, weights = ids[kept], weights[kept]
    return int(ids[_invert(weights, point)])


def _largest(values: Floats, count: int) -> Ids:
    """Indices of the `count` largest values, largest first; of equal values the lower index first."""
    rest = len(values) - count
    if rest <= 0:
        return np.argsort(-values, kind="stable")
    smallest = np.partition(values, rest)[rest]
    above = np.flatnonzero(values > smallest)
    equal = np.flatnonzero(values == smallest)[: count - len(above)]
    return np.concatenate([above[np.argsort(-values[above], kind="stable")], equal])


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """The likeliest tokens, those for which the share of all likelier ones together is below `top_p`."""
    share = top_p * weights.sum()
    count = NUCLEUS_GUESS
    while True:
        ids = _largest(weights, count)
        mass = weights[ids].cumsum()
        if mass[-1] >= share or len(ids) == len(weights):
            return ids[: int(np.searchsorted(mass, share)) + 1]
        count *= 16


def _invert(weights: Floats, point: float) -> int:
    """The index at which the running sum of `weights` first exceeds `point` of the total. Never one of weight 0."""
    mass = torch.from_numpy(weights).cumsum(0).numpy()  # four times as quick as numpy's
    target = min(point * mass[-1], np.nextafter(mass[-1], 0.0))
    return int(np.searchsorted(mass, target, side="right"))


def _logprob(raw: Floats, token_id: int, num_top: int) -> TokenLogprob:
    """The token's log-probability under the model, its rank, and the `num_top` likeliest tokens."""
    highest = raw.max()
    total = highest + np.log(np.exp(raw - highest).sum())
    value = raw[token_id]
    rank = 1 + int(np.count_nonzero(raw > value)) + int(np.count_nonzero(raw[:token_id] == value))
    top = _largest(raw, num_top) if num_top else ()
    return TokenLogprob(
        token_id,
        *_on_wire(value - total, rank),
        [TopLogprob(int(other), *_on_wire(raw[other] - total, place)) for place, other in enumerate(top, start=1)],
    )


def _as_prompt(entry: TokenLogprob) -> dict[int, PromptLogprob]:
    """The token itself first, then the likeliest ones."""
    likeliest = {top.token_id: PromptLogprob(top.logprob, top.rank) for top in entry.top_logprobs}
    return {entry.token_id: PromptLogprob(entry.logprob, entry.rank)} | likeliest


def _on_wire(logprob: float, rank: int) -> tuple[float, int | None]:
    return (float(logprob), rank) if np.isfinite(logprob) else (LOGPROB_OF_NEVER, None)
