"""Pools: page runs, views without copies, layers of different shapes."""

import pytest
import torch

from eagle3.attention import AttentionCall
from eagle3_infer.kv import Block, KVPool, KVShape, PagedContext

SHAPES = [KVShape(2, 8, 8), KVShape(1, 8, 4), KVShape(2, 8, 8)]


def test_like_layers_share_a_tensor():
    pool = KVPool(SHAPES, slots=2, pages=4, page_size=3)
    assert [tuple(t.shape) for t in pool.tensors] == [(2, 4, 3, 2, 8)] * 2 + [(1, 4, 3, 1, 8), (1, 4, 3, 1, 4)]
    assert pool.paged(1)[1].shape == (4, 3, 1, 4)


def test_slots_take_runs_of_pages_and_give_them_back():
    pool = KVPool(SHAPES, slots=4, pages=6, page_size=4)
    assert pool.assign(0, 8)
    assert pool.assign(1, 5)
    assert pool.assign(2, 1)
    assert pool.table[:3, :2].tolist() == [[0, 1], [2, 3], [4, 0]]
    assert not pool.assign(3, 5)
    pool.release(1)
    # two free pages beside one more, but apart: a run of three does not exist
    assert not pool.assign(3, 9)
    assert pool.assign(3, 8)
    assert pool.table[3, :2].tolist() == [2, 3]
    assert not pool.free
    for slot in range(4):
        pool.release(slot)
    assert pool.free


def test_written_rows_are_read_back_as_views():
    pool = KVPool(SHAPES, slots=2, pages=5, page_size=4)
    pool.assign(0, 4)
    pool.assign(1, 12)
    view = pool.view([1], [3], torch.arange(6)[None])
    key, value = torch.randn(1, 6, 8), torch.randn(1, 6, 4)
    pool.write(1, Block(view, 6).rows(4), key, value)
    keys, values = pool.rows(1, 1, 9)
    assert torch.equal(keys[3:], key.transpose(0, 1))
    assert torch.equal(values[3:], value.transpose(0, 1))
    assert keys.untyped_storage().data_ptr() == pool.paged(1)[0].untyped_storage().data_ptr()


def test_blocks_name_the_last_written_rows():
    pool = KVPool(SHAPES, slots=2, pages=6, page_size=4)
    pool.assign(1, 12)
    pool.assign(0, 12)
    view = pool.view([0, 1], [5, 2], torch.tensor([[0, 0, 1, 1]] * 2), queries=2)
    assert Block(view, 2).rows(4).tolist() == [12 + 7, 12 + 8, 4, 5]


def test_a_call_says_which_rows_ask():
    """Catches: contexts that guess from the number of queries whether all rows asked or some."""
    pool, length = KVPool([KVShape(1, 8, 8)] * 3, slots=1, pages=1, page_size=4), 4
    pool.assign(0, length)
    ctx = PagedContext(pool, [Block(pool.view([0], [0], torch.arange(length)[None], queries=1), length)])
    query, key, value = torch.randn(2, length, 8), torch.randn(1, length, 8), torch.randn(1, length, 8)
    every = ctx.attend(AttentionCall(0, query, key, value, 0.3))
    last = torch.tensor([3])
    some = ctx.attend(AttentionCall(1, query[:, last], key, value, 0.3, query_rows=last))
    torch.testing.assert_close(some, every[last])
    with pytest.raises(RuntimeError, match="2 query rows came, the blocks ask for 1"):
        ctx.attend(AttentionCall(2, query[:, :2], key, value, 0.3, query_rows=torch.tensor([2, 3])))
