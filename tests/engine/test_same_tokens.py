"""The engine's tokens are those of transformers run plainly on the same weights, whatever the batch, pool or split."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from fakes.models import FAMILIES, write_tiny_checkpoint
from fourhop.engine.config import EngineConfig
from fourhop.engine.open import open_engine
from fourhop.engine.server import Engine
from fourhop.kv.config import ConnectorOptions, KVTransferConfig
from fourhop.tokens.server import collect
from fourhop.wire.generate import GenerateRequest, SamplingParams

NUM_NEW = 24
BLOCK = 8
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100)
HOLD = {"do_remote_decode": True}

Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A tiny checkpoint by family, made once."""
    made: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in made:
            made[family] = write_tiny_checkpoint(tmp_path_factory.mktemp(family), family)
        return made[family]

    return find


def prompts() -> list[list[int]]:
    source = random.Random(1)
    return [[source.randrange(256) for _ in range(length)] for length in LENGTHS]


def plain_outputs(folder: Path) -> list[list[int]]:
    """What transformers generates greedily, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        done = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            pad_token_id=0,
        )
        outputs.append(done[0, len(prompt) :].tolist())
    return outputs


def make_request(prompt: list[int], **params: object) -> GenerateRequest:
    defaults = {"max_tokens": NUM_NEW, "temperature": 0.0}
    return GenerateRequest(
        request_id="r", token_ids=prompt, sampling_params=msgspec.convert(defaults | params, SamplingParams)
    )


async def generate(engine: Engine, request: GenerateRequest) -> list[int]:
    response = await collect(engine.generate(request), model=None, created=0)
    return response.choices[0].token_ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_blocks", "caching"), [(256, True), (256, False), (18, True), (18, False)])
def test_greedy_is_transformers(checkpoints: Checkpoints, family: str, num_blocks: int, caching: bool) -> None:
    """All prompts at once, in chunks of 32 tokens; with 18 blocks there is preemption. Twice, so the cache is used."""
    folder = checkpoints(family)
    config = EngineConfig(
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_num_batched_tokens=32,
        enable_prefix_caching=caching,
        num_threads=1,
    )

    async def main() -> None:
        async with open_engine(config, folder, name=family) as engine:
            expected = plain_outputs(folder)
            for _ in range(2):
                got = await asyncio.gather(*(generate(engine, make_request(prompt)) for prompt in prompts()))
                assert list(got) == expected
            assert (engine.loop.scheduler.num_preemptions > 0) == (num_blocks == 18)
            if num_blocks > 18:  # in a full pool nothing may stay long enough to be found
                assert (engine.loop.scheduler.num_cache_hits > 0) == caching

    asyncio.run(main())


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("connector", ["shm", "tcp", "nixl", "store", "multi"])
def test_a_split_is_transformers(checkpoints: Checkpoints, family: str, connector: str, tmp_path: Path) -> None:
    folder = checkpoints(family)
    config = EngineConfig(block_size=BLOCK, num_blocks=256, num_threads=1)
    members = (KVTransferConfig("shm"), KVTransferConfig("tcp"))
    options = ConnectorOptions(url=str(tmp_path), connectors=members)
    transfer = KVTransferConfig(kv_connector=connector, kv_connector_extra_config=options)

    async def split(prefill: Engine, decode: Engine, prompt: list[int]) -> list[int]:
        request = make_request(prompt)
        held = await collect(
            prefill.generate(msgspec.structs.replace(request, kv_transfer_params=HOLD)), model=None, created=0
        )
        if held.kv_transfer_params is None:
            return held.choices[0].token_ids
        return await generate(decode, msgspec.structs.replace(request, kv_transfer_params=held.kv_transfer_params))

    async def main() -> None:
        async with (
            open_engine(config, folder, name=family, transfer=transfer) as prefill,
            open_engine(config, folder, name=family, transfer=transfer) as decode,
        ):
            got = await asyncio.gather(*(split(prefill, decode, prompt) for prompt in prompts()))
            assert list(got) == plain_outputs(folder)
            assert decode.loop.jobs.counters.transfers > 0
            assert not decode.loop.jobs.counters.transfer_failures

    asyncio.run(main())


def test_a_seeded_draw_does_not_know_its_neighbours(checkpoints: Checkpoints) -> None:
    """Alone, beside unseeded and other seeds, and again: equal. Two choices differ and repeat; unseeded ones differ."""
    prompt = prompts()[6]

    async def main() -> None:
        async with open_engine(EngineConfig(block_size=BLOCK, num_threads=1), checkpoints("qwen3"), name="q") as engine:
            drawn = make_request(prompt, temperature=1.0, seed=42)
            alone = await generate(engine, drawn)
            others = [make_request(prompt, temperature=1.0), make_request(prompt, temperature=1.0, seed=43)]
            beside = await asyncio.gather(*(generate(engine, request) for request in [*others, drawn, *others]))
            assert beside[2] == alone
            assert beside[1] == beside[4] != alone
            assert beside[0] != beside[3]
            twice = [
                await collect(
                    engine.generate(make_request(prompt, temperature=1.0, seed=42, n=2)), model=None, created=0
                )
                for _ in range(2)
            ]
            first, second = ([choice.token_ids for choice in response.choices] for response in twice)
            assert first == second and first[0] == alone and first[1] != alone

    asyncio.run(main())
