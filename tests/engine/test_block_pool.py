from __future__ import annotations

import pytest

from engine.block_pool import BlockPool


def test_blocks_are_given_once() -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    assert (pool.num_free, pool.num_held) == (0, 3)
    with pytest.raises(KeyError):
        pool.allocate()


def test_a_release_too_many_is_refused() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.hold(block)
    pool.release(block)
    assert not pool.is_free(block)
    pool.release(block)
    assert pool.is_free(block)
    with pytest.raises(ValueError, match="block 0 is released, but nobody holds it"):
        pool.release(block)


def test_empty_blocks_are_reused_before_cached_ones_and_those_by_age() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(4)]
    for block in blocks[:3]:
        pool.register(block, b"%d" % block)
    for block in (blocks[1], blocks[0], blocks[3], blocks[2]):
        pool.release(block)
    assert [pool.allocate() for _ in range(4)] == [blocks[3], blocks[1], blocks[0], blocks[2]]
    assert pool.num_cached == 0


def test_a_hit_makes_a_block_young_again() -> None:
    pool = BlockPool(2)
    old, young = pool.allocate(), pool.allocate()
    pool.register(old, b"old")
    pool.register(young, b"young")
    pool.release(old)
    pool.release(young)
    found = pool.find(b"old")
    assert found == old
    pool.hold(old)
    pool.release(old)
    assert pool.allocate() == young
    assert pool.find(b"young") is None
    assert pool.find(b"old") == old


def test_the_first_block_with_a_content_stays_the_one_found() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, b"same")
    pool.register(second, b"same")
    assert pool.find(b"same") == first
    pool.forget(second)
    assert pool.find(b"same") == first
    pool.forget(first)
    assert pool.find(b"same") is None


def test_a_forgotten_free_block_is_reused_next() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.register(block, b"%d" % block)
        pool.release(block)
    pool.forget(blocks[2])
    assert pool.allocate() == blocks[2]
