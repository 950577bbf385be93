from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fourhop.kv.layout import BlockLayout, KVPool, runs

SMOLLM2 = BlockLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, itemsize=4, num_blocks=8)
TINY = BlockLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, itemsize=2, num_blocks=6)


def test_sizes_of_a_known_model() -> None:
    assert SMOLLM2.num_planes == 60
    assert SMOLLM2.block_bytes == 16 * 3 * 64 * 4
    assert SMOLLM2.num_bytes == 60 * 8 * 12_288


def test_blocks_for_rounds_up() -> None:
    assert [SMOLLM2.blocks_for(num_tokens) for num_tokens in (0, 1, 15, 16, 17, 2000)] == [0, 1, 1, 1, 2, 125]


def test_geometry_leaves_out_only_the_number_of_blocks() -> None:
    assert replace(TINY, num_blocks=99).geometry() == TINY.geometry()
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "itemsize"):
        assert replace(TINY, **{name: 99}).geometry() != TINY.geometry()


def test_pool_is_zeroed_and_shaped_by_plane_and_block() -> None:
    pool = KVPool(TINY)
    assert pool.planes.shape == (4, 6, TINY.block_bytes)
    assert not pool.planes.any()
    pool.close()


def test_pool_is_a_file_that_shows_what_is_written() -> None:
    pool = KVPool(TINY)
    pool.planes[3, 5] = 9
    with open(pool.path, "rb") as file:  # noqa: PTH123
        content = np.frombuffer(file.read(), np.uint8).reshape(pool.planes.shape)
    assert np.array_equal(content, pool.planes)
    pool.close()
    pool.close()


def test_run_of_blocks_is_one_contiguous_range_in_a_plane() -> None:
    pool = KVPool(TINY)
    assert pool.planes[1, 2:5].flags.c_contiguous
    pool.close()


def test_runs_join_only_what_is_contiguous_on_both_sides() -> None:
    assert runs([], []) == []
    assert runs([4], [7]) == [(4, 7, 1)]
    assert runs([1, 2, 3], [5, 6, 7]) == [(1, 5, 3)]
    assert runs([1, 2, 3, 4], [5, 6, 0, 1]) == [(1, 5, 2), (3, 0, 2)]
    assert runs([2, 1], [1, 2]) == [(2, 1, 1), (1, 2, 1)]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))))
def test_runs_say_the_same_as_the_pairs_and_cannot_be_joined_further(pairs: list[tuple[int, int]]) -> None:
    found = runs([source for source, _ in pairs], [target for _, target in pairs])
    assert [(src + step, dst + step) for src, dst, length in found for step in range(length)] == pairs
    for (src, dst, length), (next_src, next_dst, _) in pairwise(found):
        assert (src + length, dst + length) != (next_src, next_dst)
