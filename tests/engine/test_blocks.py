"""The pool's bookkeeping: every block is in one state, names find what they should and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from fourhop.engine.blocks import BlockPool, extend_hashes, hash_block, root_hash


def hashes_of(token_ids: list[int], block_size: int = 4, salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, block_size, salt)
    return hashes


def test_only_full_blocks_are_named() -> None:
    assert [len(hashes_of(list(range(n)), 16)) for n in (15, 16, 33)] == [0, 1, 2]


@given(st.lists(st.integers(0, 300), max_size=40), st.integers(0, 40))
def test_hashes_grow_as_if_computed_at_once(token_ids: list[int], cut: int) -> None:
    grown = hashes_of(token_ids[:cut])
    extend_hashes(grown, token_ids, 4, "")
    assert grown == hashes_of(token_ids)


def test_salts_never_share_and_no_salt_is_the_empty_one() -> None:
    roots = {root_hash(salt) for salt in ("", "A", "B")}
    assert len(roots) == 3
    assert hashes_of([1, 2, 3, 4]) == hashes_of([1, 2, 3, 4], salt="")


def test_hashes_are_equal_in_another_process() -> None:
    code = "from fourhop.engine.blocks import *; print(hash_block(root_hash('x'), [1, 2, 3]).hex())"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == hash_block(root_hash("x"), [1, 2, 3]).hex()


def test_neighbours_are_preferred() -> None:
    pool = BlockPool(8)
    first = pool.allocate(2)
    assert first == [0, 1]
    other = pool.allocate(1)
    assert pool.allocate(1, after=other[-1]) == [3]
    pool.release(first)
    assert pool.allocate(3, after=3) == [4, 5, 6]


def test_a_recycled_block_is_not_found_again() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    names = hashes_of(list(range(8)))
    for block, name in zip(blocks, names, strict=True):
        pool.name(block, name)
    pool.release(blocks)
    assert pool.find(names) == blocks
    again = pool.allocate(1)
    assert again == [1], "the tail goes before the head"
    assert pool.find(names) == [0]
    pool.check()


def test_more_than_free_is_refused() -> None:
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)


def test_a_double_release_is_our_bug() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="not used"):
        pool.release(blocks)


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocate, share, name and release keeps the books straight."""

    users = Bundle("users")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.used: list[list[int]] = []
        self.names = hashes_of(list(range(4 * 12)))

    @precondition(lambda self: self.pool.num_free > 0)
    @rule(target=users, data=st.data())
    def allocate(self, data: st.DataObject) -> list[int]:
        count = data.draw(st.integers(1, self.pool.num_free))
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & {block for user in self.used for block in user}
        self.used.append(blocks)
        return blocks

    @rule(target=users)
    def share(self) -> list[int]:
        blocks = self.pool.find(self.names)
        self.pool.share(blocks)
        self.used.append(blocks)
        return blocks

    @rule(blocks=users, index=st.integers(0, 11))
    def name(self, blocks: list[int], index: int) -> None:
        if blocks in self.used and blocks:
            self.pool.name(blocks[0], self.names[index])

    @rule(blocks=consumes(users))
    def release(self, blocks: list[int]) -> None:
        if blocks in self.used:
            self.used.remove(blocks)
            self.pool.release(blocks)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check()
        assert self.pool.num_free == 12 - len({block for user in self.used for block in user})


TestPool = PoolMachine.TestCase
