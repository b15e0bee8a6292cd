"""The free queue, exact to the order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.pool import BlockPool, OutOfBlocksError, PredictedError


def test_fresh_blocks_come_in_order_and_null_never():
    pool = BlockPool(5, caching=True)
    assert pool.free_order() == [1, 2, 3, 4]
    assert pool.take(4) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_taking_too_many_takes_nothing():
    pool = BlockPool(5, caching=True)
    with pytest.raises(OutOfBlocksError):
        pool.take(5)
    assert pool.free_order() == [1, 2, 3, 4]


def test_keyless_blocks_go_to_the_head_as_one_run_and_keyed_ones_to_the_tail():
    pool = BlockPool(8, caching=True)
    pool.take(5)
    pool.link(100, 2, 16)
    pool.link(200, 4, 16)
    pool.release([5, 4, 3, 2, 1])
    assert pool.free_order() == [5, 3, 1, 6, 7, 4, 2]


def test_null_is_neither_released_nor_touched():
    pool = BlockPool(3, caching=True)
    pool.release([0, 0])
    pool.touch([0])
    assert pool.free_order() == [1, 2]
    assert pool.refs[0] == 0


def test_a_touched_block_leaves_the_queue_from_the_middle():
    pool = BlockPool(4, caching=True)
    for key, block_id in enumerate(pool.take(3)):
        pool.link(key, block_id, 16)
    pool.release([1, 2, 3])
    pool.touch([2])
    assert pool.free_order() == [1, 3]
    assert pool.refs == [0, 0, 1, 0]


def test_taking_evicts_all_keys_of_a_block():
    pool = BlockPool(2, caching=True)
    pool.take(1)
    pool.link(7, 1, 16)
    pool.link(8, 1, 16)
    pool.release([1])
    assert pool.lookup_all([7, 8]) == [1, 1]
    pool.take(1)
    assert pool.lookup_all([7]) is pool.lookup_all([8]) is None
    assert not list(pool.links())


def test_a_lookup_finds_the_earliest_link_that_is_left():
    pool = BlockPool(4, caching=True)
    pool.take(3)
    for block_id in (2, 1, 3):
        pool.link(9, block_id, 16)
    assert pool.lookup_all([9]) == [2]
    pool.drop_keys(2)
    assert pool.lookup_all([9]) == [1]


def test_reset_needs_all_blocks_free_and_keeps_the_order():
    pool = BlockPool(4, caching=True)
    pool.take(2)
    pool.link(5, 1, 16)
    pool.release([2])
    assert not pool.reset()
    assert pool.lookup_all([5]) == [1]
    pool.release([1])
    order = pool.free_order()
    assert pool.reset()
    assert pool.lookup_all([5]) is None
    assert pool.free_order() == order == [2, 3, 1]
    assert pool.take(3) == [2, 3, 1]
    assert pool.num_evicted == 0, "the key of block 1 was gone"


@given(st.data())
def test_every_block_is_free_or_held(data):
    pool = BlockPool(data.draw(st.integers(2, 9)), caching=True)
    held: list[int] = []
    for key in range(data.draw(st.integers(0, 30))):
        if held and data.draw(st.booleans()):
            block_id = held.pop(data.draw(st.integers(0, len(held) - 1)))
            if data.draw(st.booleans()):
                pool.link(key, block_id, 16)
            pool.release([block_id])
        elif pool.num_free:
            held += pool.take(data.draw(st.integers(1, pool.num_free)))
        order = pool.free_order()
        assert len(order) == pool.num_free == len(set(order))
        assert sorted(order + held) == list(range(1, pool.num_blocks))
        assert {b for b in range(1, pool.num_blocks) if pool.refs[b] == 0} == set(order)


def test_a_full_block_may_have_had_the_key_of_a_shorter_prefix_only() -> None:
    pool = BlockPool(4, caching=True)
    block_id = pool.take(1)[0]
    pool.link(7, block_id, 4)
    with pytest.raises(PredictedError):
        pool.link_full(8, block_id, 4)
    pool.link_full(8, block_id, 6)
    assert pool.primary_key(block_id) == 8
