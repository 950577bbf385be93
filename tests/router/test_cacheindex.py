"""What cache events say of a prompt is what the engine's own block pool would find."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fourhop.engine.blocks import BlockPool, extend_hashes
from fourhop.engine.cachelog import CacheLog
from fourhop.engine.scheduler import Scheduler
from fourhop.engine.sequence import Sequence
from fourhop.engine.step import Limits
from fourhop.router.cacheindex import CacheIndex, chain
from fourhop.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from fourhop.wire.generate import SamplingParams

SIZE = 4
PROMPTS = st.lists(st.integers(10, 11), min_size=1, max_size=24)


def stored(
    names: list[int | bytes], token_ids: list[int], parent: int | bytes | None = None, **more: Any
) -> BlockStored:
    return BlockStored(
        block_hashes=names,
        parent_block_hash=parent,
        token_ids=token_ids,
        block_size=len(token_ids) // len(names),
        **more,
    )


def run_alone(scheduler: Scheduler, prompt: list[int], salt: str) -> None:
    params = SamplingParams()
    scheduler.add(Sequence(0, "r", prompt, params, 0, max_tokens=3, eos_token_ids=frozenset(), cache_salt=salt))
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.advance(step.work, {item.sequence.seq_id: 10 for item in step.work if item.samples})


@given(st.lists(st.tuples(PROMPTS, st.sampled_from(["", "", "tenant"])), min_size=1, max_size=12), PROMPTS)
def test_the_index_knows_what_the_engine_knows(asked: list[tuple[list[int], str]], wanted: list[int]) -> None:
    """Whatever was served, blocks taken again among it; and through the wire."""
    log = CacheLog(SIZE)
    pool = BlockPool(9, log.removed)
    scheduler = Scheduler(pool, Limits(SIZE, 16, 8, 36, prefix_caching=True, max_handover_tokens=16), log)
    index = CacheIndex()
    for prompt, salt in asked:
        run_alone(scheduler, prompt, salt)
        batch = EventBatch(1.0, log.take(), 0)
        index.apply("e", msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=EventBatch).events)
        hashes: list[bytes] = []
        extend_hashes(hashes, wanted, SIZE, "")
        found = len(pool.find(hashes))
        assert index.num_blocks("e", chain(wanted, SIZE)) == found
        assert index.holders(chain(wanted, SIZE)) == ((["e"], found) if found else ([], 0))


def test_engines_of_any_hash_are_compared_by_tokens() -> None:
    index = CacheIndex()
    index.apply("a", [stored([7, 8], [1, 2, 3, 4])])
    index.apply("b", [stored([b"x"], [1, 2]), stored([b"y"], [5, 6], b"x")])
    links = chain([1, 2, 3, 4, 5], 2)
    assert (index.num_blocks("a", links), index.num_blocks("b", links)) == (2, 1)
    assert index.holders(links) == (["a"], 2)
    assert index.holders(chain([1, 2, 5, 6], 2)) == (["b"], 2)
    assert index.holders(chain([1, 2], 2)) == (["a", "b"], 1)
    assert index.holders(chain([9, 9], 2)) == ([], 0)


def test_blocks_go_one_by_one_or_all_at_once() -> None:
    index = CacheIndex()
    index.apply("a", [stored([7, 8], [1, 2, 3, 4]), BlockRemoved(block_hashes=[8, 99])])
    assert index.num_blocks("a", chain([1, 2, 3, 4], 2)) == 1
    index.apply("a", [AllBlocksCleared(), stored([9], [3, 4])])
    assert index.holders(chain([1, 2], 2)) == ([], 0)
    assert index.holders(chain([3, 4], 2)) == (["a"], 1)
    index.forget("a")
    assert "a" not in index and len(index) == 0 and index.holders(chain([3, 4], 2)) == ([], 0)


def test_what_nobody_else_may_find_and_what_makes_no_sense_is_left_out() -> None:
    index = CacheIndex()
    index.apply("a", [stored([1], [1, 2], extra_keys=[[["cache_salt", "s"]]])])
    index.apply("a", [stored([2], [3, 4], parent=1), stored([3], [5, 6], parent=77)])
    index.apply("a", [BlockStored(block_hashes=[4], parent_block_hash=None, token_ids=[1], block_size=2)])
    assert len(index) == 0


def test_two_blocks_with_the_same_tokens_are_there_until_both_are_gone() -> None:
    index = CacheIndex()
    index.apply("a", [stored([1], [1, 2]), stored([2], [1, 2])])
    index.apply("a", [BlockRemoved(block_hashes=[1])])
    assert index.num_blocks("a", chain([1, 2], 2)) == 1
    index.apply("a", [BlockRemoved(block_hashes=[2])])
    assert index.num_blocks("a", chain([1, 2], 2)) == 0


def test_vllms_own_bytes_are_read() -> None:
    """A batch as vLLM 0.32 packs it: maps with a type, an array around them, fields that are not known here."""
    event = {
        "type": "BlockStored",
        "block_hashes": [2**64 - 1],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    packed = msgspec.msgpack.encode([12.5, [event, {"type": "AllBlocksCleared"}], 0])
    batch = msgspec.msgpack.decode(packed, type=EventBatch)
    assert [type(each) for each in batch.events] == [BlockStored, AllBlocksCleared]
    assert batch.events[0] == stored([2**64 - 1], [1, 2], medium="GPU")
