"""Fifty prompts get the same tokens everywhere: plain transformers, one engine, and engines that hand KV over.

Eight at a time, with the prefix cache and without, and in a pool so small that sequences lose their blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from flows.pipelines import metric, up
from flows.servers import SMOLLM2, running, url_of
from fourhop import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXT = Path(__file__).parents[2] / "LICENSE"
LONGEST = 1500
BLOCKS = (1, 2, 3, 4, 5, 6, 7, 8)
"""Block counts; prompts are one token shorter, as long, and one token longer."""
LENGTHS = [
    LONGEST,
    *(16 * num_blocks + more for num_blocks in BLOCKS for more in (-1, 0, 1)),
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 20, 24, 28, 36, 40, 44, 52, 55, 60, 70, 90),
]
SMALL_POOL = 98
"""Blocks: the longest prompt and its answer need 95, so that beside it others soon have no block to grow into."""

GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}

Output = list[int]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Slices of a text. Every third begins where the text does, so that there are prefixes to share."""
    folder = checkpoint.find(SMOLLM2).folder
    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT.read_text()).ids
    starts = [0 if number % 3 == 0 else number * 41 % (len(ids) - length) for number, length in enumerate(LENGTHS)]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


def num_new(number: int) -> int:
    """How many tokens are asked for: 8 to 10."""
    return 8 + number % 3


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[Output]:
    """What transformers generates greedily, one prompt at a time, on one core as an engine of `up`."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.find(SMOLLM2).folder, dtype=torch.float32)
    outputs = []
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": num_new(number), "do_sample": False, "pad_token_id": 0}
        done = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        outputs.append(done[0, len(prompt) :].tolist())
    torch.set_num_threads(num_threads)
    return outputs


@pytest.fixture(scope="module")
def one_engine(prompts: list[list[int]]) -> Iterator[dict[str, list[Output]]]:
    """The outputs of `fourhop serve`."""
    with running(("serve", "--port", "0", "--num-threads", "1")) as (server,):
        yield ask_all(url_of(server), prompts)


def ask_all(url: str, prompts: list[list[int]]) -> dict[str, list[Output]]:
    """Every prompt, greedily and then by seed, eight at a time."""
    with ThreadPoolExecutor(8) as threads, httpx.Client(base_url=url, timeout=120) as client:

        def ask(number: int, sampling: dict[str, Any]) -> Output:
            body = {"model": SMOLLM2, "prompt": prompts[number], "max_tokens": num_new(number), "seed": number}
            answer = client.post("/v1/completions", json=body | sampling | {"return_token_ids": True})
            assert answer.status_code == 200, answer.text
            token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
            return token_ids

        numbers = range(len(prompts))
        greedy = list(threads.map(lambda number: ask(number, GREEDY), numbers))
        seeded = list(threads.map(lambda number: ask(number, SEEDED), numbers))
        return {"greedy": greedy, "seeded": seeded}


def test_prompts_are_as_promised(prompts: list[list[int]]) -> None:
    assert [len(prompt) for prompt in prompts] == LENGTHS
    assert len(LENGTHS) == 50
    assert sum(LENGTHS) < 4000


def test_one_engine_is_transformers(one_engine: dict[str, list[Output]], plain: list[Output]) -> None:
    assert one_engine["greedy"] == plain
    assert sum(a != b for a, b in zip(one_engine["seeded"], plain, strict=True)) > 25, "seeds make a difference"


def test_a_split_over_shm_in_a_small_pool(prompts: list[list[int]], one_engine: dict[str, list[Output]]) -> None:
    """Sequences whose KV was pulled lose it again, and are computed anew."""
    with up("--connector", "shm", "--num-blocks", str(SMALL_POOL)) as pipeline:
        assert ask_all(pipeline.url, prompts) == one_engine
        assert metric(pipeline.urls["decode-0"], "vllm:num_preemptions_total") > 0
        assert metric(pipeline.urls["decode-0"], "fourhop:kv_transfers_total") == 2 * len(prompts)
        assert metric(pipeline.urls["prefill-0"], "vllm:prefix_cache_hits_total") > 0


def test_a_split_over_tcp_without_a_cache(prompts: list[list[int]], one_engine: dict[str, list[Output]]) -> None:
    with up("--connector", "tcp", "--no-enable-prefix-caching") as pipeline:
        assert ask_all(pipeline.url, prompts) == one_engine
        assert metric(pipeline.urls["decode-0"], "fourhop:kv_transfers_total") == 2 * len(prompts)
        assert metric(pipeline.urls["prefill-0"], "vllm:prefix_cache_hits_total") == 0
