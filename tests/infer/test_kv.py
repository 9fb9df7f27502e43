"""Pools: who gets which pages, views without copies, layers of different shapes, nothing left of earlier requests."""

import random

import pytest
import torch
from torch import Tensor

from eagle3.attention import AttentionCall
from eagle3_infer.config import EngineConfig, SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request
from eagle3_infer.kv import Block, KVPool, KVShape, PagedContext
from eagle3_kernels.paging import page_runs
from oracles.invariants import CheckedEngine, KnowingHead, random_head, shifted_target
from oracles.overfit import greedy, random_prompts

SHAPES = [KVShape(2, 8, 8), KVShape(1, 8, 4), KVShape(2, 8, 8)]


def test_like_layers_share_a_tensor():
    pool = KVPool(SHAPES, slots=2, pages=4, page_size=3)
    assert [tuple(t.shape) for t in pool.tensors] == [(2, 4, 3, 2, 8)] * 2 + [(1, 4, 3, 1, 8), (1, 4, 3, 1, 4)]
    assert pool.paged(1)[1].shape == (4, 3, 1, 4)


def assigned(pool: KVPool, slot: int, pages: int) -> list[int]:
    """Pages that the slot is given."""
    assert pool.assign(slot, pages * pool.page_size)
    return pool.table[slot, :pages].tolist()


def pool_with_free(free: list[int], pages: int = 20) -> KVPool:
    """A pool of one row per page in which only these pages are free; slot 0 is free, too."""
    pool = KVPool(SHAPES, slots=pages + 1, pages=pages, page_size=1)
    for slot in range(1, pages + 1):
        assert assigned(pool, slot, 1) == [slot - 1]
    for page in free:
        pool.release(page + 1)
    return pool


def test_slots_take_pages_and_give_them_back():
    pool = KVPool(SHAPES, slots=4, pages=6, page_size=4)
    assert pool.assign(0, 8)
    assert pool.assign(1, 5)
    assert pool.assign(2, 1)
    assert pool.table[:3, :2].tolist() == [[0, 1], [2, 3], [4, 0]]
    assert not pool.assign(3, 5)
    pool.release(1)
    # three pages are free, but apart
    assert not pool.assign(3, 13)
    assert pool.assign(3, 9)
    assert pool.table[3, :3].tolist() == [2, 3, 5]
    assert not pool.free
    for slot in range(4):
        pool.release(slot)
    assert pool.free
    assert not pool.table.any()


@pytest.mark.parametrize(
    "free, wanted, given",
    [
        # one run: the shortest that holds all, the first of those
        ([0, 1, 2, 3, 6, 7, 9, 10], 2, [6, 7]),
        ([0, 1, 2, 3, 6, 7, 9], 1, [9]),
        ([0, 1, 2, 3, 6, 7, 9], 3, [0, 1, 2]),
        ([3, 7, 11], 1, [3]),
        # several: whole runs from the longest on, the rest from the shortest that holds it; in ascending order
        ([0, 1, 2, 4, 6, 7, 8, 9, 12, 13], 5, [4, 6, 7, 8, 9]),
        ([0, 1, 2, 4, 6, 7, 8, 9, 12, 13], 6, [6, 7, 8, 9, 12, 13]),
        ([2, 5, 8, 11], 3, [2, 5, 8]),
        ([2, 5, 8, 11], 4, [2, 5, 8, 11]),
    ],
)
def test_fewest_runs_and_best_fit(free, wanted, given):
    """Catches: first fit, which breaks up long runs; more pieces than needed, each of which costs every layer."""
    assert assigned(pool_with_free(free), 0, wanted) == given


@pytest.mark.parametrize("seed", range(5))
def test_pages_have_one_owner_and_fail_only_when_too_few(seed):
    """200 random arrivals and departures: whoever fits is let in, whatever lies where."""
    draw, pool, owned = random.Random(seed), KVPool(SHAPES, slots=8, pages=24, page_size=2), {}
    for _ in range(200):
        slot = draw.randrange(8)
        if owned.pop(slot, None) is not None:
            pool.release(slot)
            continue
        rows = draw.randint(1, 16)
        wanted, free = pool.pages_for(rows), 24 - sum(map(len, owned.values()))
        assert pool.assign(slot, rows) == (wanted <= free)
        if wanted <= free:
            owned[slot] = pool.table[slot, :wanted].tolist()
        held = [page for pages in owned.values() for page in pages]
        assert len(set(held)) == len(held)
        assert all(0 <= page < 24 for page in held)


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


def test_scattered_rows_are_read_back_in_order():
    pool = pool_with_free([1, 2, 4, 7, 8, 9], pages=10)
    assert pool.assign(0, 6)
    view = pool.view([0], [2], torch.arange(4)[None])
    key, value = torch.randn(1, 4, 8), torch.randn(1, 4, 4)
    pool.write(1, Block(view, 4).rows(1), key, value)
    for length in (2, 3, 6):
        keys, values = pool.rows(1, 0, length)
        assert torch.equal(keys[2:], key.transpose(0, 1)[: length - 2])
        assert torch.equal(values[2:], value.transpose(0, 1)[: length - 2])


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


TREE = TreeConfig(depth=4, top_k=3, nodes=12)


class ScatteredEngine(CheckedEngine):
    """Notes the most runs that any request's pages formed, in each pool."""

    runs = (0, 0)

    def step(self, waiting):
        done = super().step(waiting)
        for s in self.running:
            of_slot = (len(page_runs(pool.table[s.slot, : pool.pages_for(s.length)].tolist())) for pool in self.pools)
            self.runs = tuple(map(max, self.runs, of_slot))
        return done


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "gemma4"])
def test_requests_run_on_scattered_pages(family):
    """Short requests leave between long ones, later long ones fill the gaps; pools are checked after every round."""
    target = shifted_target(family)
    prompts, limits = random_prompts(target, 8), (4, 30, 3, 26, 2, 28, 30, 24)
    expected = [greedy(target, p, n) for p, n in zip(prompts, limits, strict=True)]
    head = KnowingHead(random_head(target), prompts[-1] + expected[-1], share=0.7)
    tight = EngineConfig(slots=5, page_size=4, pages=44, head_page_size=2, head_pages=72)
    engine = ScatteredEngine(target, head, TREE, tight)
    results = engine.generate([Request(p, max_new_tokens=n) for p, n in zip(prompts, limits, strict=True)])
    assert [r.token_ids for r in results] == expected
    assert min(engine.runs) > 1


class PoisonedEngine(Engine):
    """Before every round, all rows of both pools that hold no committed token of a running request are spoiled."""

    poison = float("nan")
    spoiled = 0

    def step(self, waiting):
        for which, pool in enumerate(self.pools):
            keep = torch.zeros(pool.pages, pool.page_size, dtype=torch.bool)
            for s in self.running:
                length, pages = (s.length, s.head_length)[which], pool.table[s.slot].tolist()
                for row in range(length):
                    keep[pages[row // pool.page_size], row % pool.page_size] = True
            for tensor in pool.tensors:
                spoil(tensor, ~keep, self.poison)
            self.spoiled += int((~keep).sum())
        return super().step(waiting)


def spoil(tensor: Tensor, rows: Tensor, value: float) -> None:
    tensor.masked_fill_(rows[None, :, :, None, None], value)


@pytest.mark.parametrize("poison", [torch.nan, 1e4])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_only_committed_rows_are_ever_read(family, poison):
    """Catches: rows of earlier requests, of rejected drafts or of other slots that still weigh in."""
    target = shifted_target(family)
    prompts = random_prompts(target, 4)
    requests = [
        Request(p, SamplingConfig(0.7 * (i % 2), seed=3), max_new_tokens=n, prompt_id=i)
        for i, (p, n) in enumerate(zip(prompts, (5, 24, 9, 17), strict=True))
    ]
    head = KnowingHead(random_head(target), prompts[3] + greedy(target, prompts[3], 17), share=0.7)
    config = EngineConfig(slots=2, page_size=4)
    clean = Engine(target, head, TREE, config).generate(requests)
    engine = PoisonedEngine(target, head, TREE, config)
    engine.poison = poison
    results = engine.generate(requests)
    assert [(r.token_ids, r.run_lengths) for r in results] == [(r.token_ids, r.run_lengths) for r in clean]
    assert engine.spoiled > 0
