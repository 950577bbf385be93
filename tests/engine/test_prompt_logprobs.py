"""Log-probabilities of the prompt: those of transformers run plainly, whatever the chunks, the pool or the split."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from fakes.engines import toy_engine, toy_pair
from fakes.models import write_tiny_checkpoint
from fourhop.engine import assembly
from fourhop.engine.config import EngineConfig
from fourhop.engine.open import open_engine
from fourhop.engine.sampler import LOGPROB_OF_NEVER, prompt_logprobs
from fourhop.engine.toy import toy_output, toy_prompt_logprobs
from fourhop.tokens.server import TokenServer, collect
from fourhop.wire.errors import ClientError
from fourhop.wire.generate import GenerateRequest, GenerateResponse, SamplingParams
from fourhop.wire.logprobs import PromptLogprob

BLOCK = 8
TOP = 3
HOLD = {"do_remote_decode": True}


def make_request(prompt: list[int], max_tokens: int = 4, *, top: int | None = TOP, **fields: Any) -> GenerateRequest:
    params = {"max_tokens": max_tokens, "temperature": 0.0, "prompt_logprobs": top, **fields.pop("params", {})}
    return GenerateRequest(
        request_id="r", token_ids=prompt, sampling_params=msgspec.convert(params, SamplingParams), **fields
    )


async def answer(server: TokenServer, request: GenerateRequest) -> GenerateResponse:
    return await collect(server.generate(request), model=None, created=0)


def check_plain(response: GenerateResponse, prompt: list[int], reference: Any) -> None:
    """Compare with one forward pass over the whole prompt."""
    found = response.prompt_logprobs
    assert found is not None and len(found) == len(prompt) and found[0] is None
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    for at in range(1, len(prompt)):
        entry, row = found[at], expected[at - 1]
        assert entry is not None and next(iter(entry)) == prompt[at]
        assert set(entry) == {prompt[at], *row.topk(TOP).indices.tolist()}
        for token_id, one in entry.items():
            assert one.logprob == pytest.approx(row[token_id].item(), abs=1e-3)
            assert one.rank == 1 + int((row > row[token_id]).sum())


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("num_blocks", [256, 18])
def test_they_are_those_of_transformers(
    tmp_path: Path, family: str, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of 12 prompt tokens, twice over a filled prefix cache, beside prompts that do not ask; with 18 blocks
    there is preemption."""
    folder = write_tiny_checkpoint(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    monkeypatch.setattr(assembly, "PROMPT_LOGITS_BYTES", 12 * 4 * reference.config.vocab_size)
    config = EngineConfig(block_size=BLOCK, num_blocks=num_blocks, max_num_batched_tokens=32, num_threads=1)
    source = random.Random(2)
    prompts = [[source.randrange(256) for _ in range(length)] for length in (1, 2, 8, 13, 33, 64, 100)]

    async def main() -> None:
        async with open_engine(config, folder, name=family) as engine:
            for _ in range(2):
                requests = [make_request(prompt, 24, top=top) for prompt in prompts for top in (TOP, None)]
                responses = await asyncio.gather(*(answer(engine, request) for request in requests))
                for prompt, asked, other in zip(prompts, responses[::2], responses[1::2], strict=True):
                    check_plain(asked, prompt, reference)
                    assert other.prompt_logprobs is None
                    assert asked.choices[0].token_ids == other.choices[0].token_ids
                    assert asked.usage is not None and asked.usage.prompt_tokens_details is not None
                    assert asked.usage.prompt_tokens_details.cached_tokens == 0
            assert (engine.loop.scheduler.num_preemptions > 0) == (num_blocks == 18)

    asyncio.run(main())


def test_minus_infinity_has_no_rank_and_equals_go_by_id() -> None:
    logits = torch.tensor([[1.0, 1.0, float("-inf")], [0.0, 0.0, 0.0]])
    assert prompt_logprobs(logits, [2, 1], 0) == [
        {2: PromptLogprob(LOGPROB_OF_NEVER)},
        {1: PromptLogprob(pytest.approx(-1.0986, abs=1e-4), 2)},  # type: ignore[arg-type]
    ]
    (first,) = prompt_logprobs(logits[:1], [1], 2)
    assert [(token_id, one.rank) for token_id, one in first.items()] == [(1, 2), (0, 1)]


def test_they_come_once_and_before_the_other_choices() -> None:
    prompt = [11, 12, 13, 14, 15]

    async def main() -> None:
        async with toy_engine() as engine:
            request = make_request(prompt, params={"n": 3, "temperature": 1.0, "seed": 5})
            chunks = [chunk async for chunk in engine.generate(request)]
            assert chunks[0].prompt_logprobs == toy_prompt_logprobs(prompt)
            assert chunks[0].choices[0].index == 0
            assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])
            assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1, 2}

    asyncio.run(main())


def test_the_engine_that_prefills_gives_them() -> None:
    prompt = list(range(20, 37))

    async def main() -> None:
        async with toy_pair() as pair:
            held = await answer(pair.prefill, make_request(prompt, kv_transfer_params=HOLD))
            assert held.prompt_logprobs == toy_prompt_logprobs(prompt)
            assert held.kv_transfer_params is not None
            asked_again = make_request(prompt, kv_transfer_params=held.kv_transfer_params)
            with pytest.raises(ClientError) as refusal:
                await answer(pair.decode, asked_again)
            assert refusal.value.param == "sampling_params.prompt_logprobs"
            rest = make_request(prompt, top=None, kv_transfer_params=held.kv_transfer_params)
            assert (await answer(pair.decode, rest)).choices[0].token_ids == toy_output(prompt, 4)

    asyncio.run(main())


def test_a_prefix_that_lies_elsewhere_is_computed_here() -> None:
    """A hold may name KV of the prompt's beginning: it is not pulled, since it has no logits."""
    prompt = list(range(20, 37))

    async def main() -> None:
        async with toy_pair() as pair:
            part = await answer(pair.decode, make_request(prompt[:12], top=None, kv_transfer_params=HOLD))
            hold = HOLD | {"prefix": part.kv_transfer_params}
            held = await answer(pair.prefill, make_request(prompt, kv_transfer_params=hold))
            assert held.prompt_logprobs == toy_prompt_logprobs(prompt)
            assert held.usage is not None and held.usage.prompt_tokens_details is not None
            assert held.usage.prompt_tokens_details.cached_tokens == 0

    asyncio.run(main())
