"""tree_attention against a dense formula per row: catches siblings seeing each other, windows by row, lost heads."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle3_kernels.bits import pack_bits, unpack_bits
from eagle3_kernels.build_tree import build_tree
from eagle3_kernels.paging import Run, page_runs, row_views
from eagle3_kernels.tree_attention import TreeView, tree_attention
from eagle3_kernels.tree_attention.reference import MOST_FOLDED_ROWS
from oracles.drafted import draw_levels

PAGE = 4
# how a slot's pages lie in the pool: in one run, in two of several pages each, in any order
LAYOUTS = ["run", "halves", "scattered"]


def dense_row(query: Tensor, keys: Tensor, values: Tensor, seen: list[int], scaling, softcap, sinks) -> Tensor:
    """One query [Hq, d] over the rows it sees, head by head, in float64."""
    out, group = [], query.shape[0] // keys.shape[1]
    for head, q in enumerate(query.double()):
        scores = torch.stack([q @ keys[row, head // group].double() for row in seen]) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp()
        total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
        out.append(sum(w * values[row, head // group].double() for w, row in zip(weights / total, seen, strict=True)))
    return torch.stack(out)


def page_table(layout: str, slots: int, per_slot: int, draw: torch.Generator) -> Tensor:
    if layout == "scattered":
        return torch.randperm(slots * per_slot, generator=draw).view(slots, per_slot).int()
    pages = torch.arange(slots * per_slot).view(slots, per_slot)
    # the later half of every slot's rows lies before the earlier one
    return (pages.roll(per_slot // 2, 1) if layout == "halves" else pages).int()


class Case:
    """Random pools, and a query per fresh row."""

    def __init__(self, lens, fresh, heads=4, kv_heads=2, dim=8, value_dim=8, layout="run", dtype=torch.float32, seed=0):
        draw = torch.Generator().manual_seed(seed)
        slots, per_slot = len(lens), (max(lens) + fresh) // PAGE + 1
        self.table = page_table(layout, slots, per_slot, draw)
        # rows that nobody may see are NaN
        self.keys, self.values = (
            torch.full((slots * per_slot, PAGE, kv_heads, d), torch.nan, dtype=dtype) for d in (dim, value_dim)
        )
        self.lens, self.fresh = torch.tensor(lens, dtype=torch.int32), fresh
        self.rows = []
        for slot, length in enumerate(lens):
            k, v = (torch.randn(length + fresh, kv_heads, d, generator=draw).to(dtype) for d in (dim, value_dim))
            self.rows.append((k, v))
            for row in range(length + fresh):
                page = int(self.table[slot, row // PAGE])
                self.keys[page, row % PAGE], self.values[page, row % PAGE] = k[row], v[row]
        self.query = torch.randn(slots, fresh, heads, dim, generator=draw).to(dtype)

    def check(self, view: TreeView, window=None, softcap=None, sinks=None, tolerance=2e-6):
        scaling = 1 / math.sqrt(self.query.shape[-1])
        query = self.query[:, -view.queries :]
        out = tree_attention(query, self.keys, self.values, view, scaling, window, softcap, sinks)
        assert out.is_contiguous()
        for slot, (k, v) in enumerate(self.rows):
            length = int(self.lens[slot])
            position = [*range(length), *(length + view.positions[slot]).tolist()]
            for n in range(view.queries):
                own = length + self.fresh - view.queries + n
                if view.mask is None:
                    seen = list(range(own + 1))
                else:
                    seen = list(range(length)) + [
                        length + i for i in unpack_bits(view.mask[slot, n], self.fresh).nonzero()
                    ]
                seen = [int(r) for r in seen if window is None or position[own] - position[r] < window]
                expected = dense_row(query[slot, n], k, v, seen, scaling, softcap, sinks)
                assert (out[slot, n].double() - expected).abs().max() <= tolerance


def tree_view(case: Case, seed: int = 0) -> TreeView:
    slots, n = len(case.lens), case.fresh
    tree = build_tree(torch.zeros(slots), draw_levels("random", slots, 5, 8, 30, seed), n - 1)
    return TreeView(case.table, case.lens, tree.position, tree.ancestor_mask, n)


def causal_view(case: Case, queries: int) -> TreeView:
    positions = torch.arange(case.fresh).expand(len(case.lens), -1)
    return TreeView(case.table, case.lens, positions, None, queries)


@pytest.mark.parametrize(
    "heads, kv_heads, dim, value_dim", [(4, 4, 8, 8), (6, 2, 16, 16), (3, 1, 8, 12), (9, 3, 20, 6)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tree_rows_see_prefix_and_ancestors(heads, kv_heads, dim, value_dim, layout):
    case = Case([7, 0, 13], 9, heads, kv_heads, dim, value_dim, layout)
    case.check(tree_view(case))


@pytest.mark.parametrize("layout", ["run", "scattered"])
@pytest.mark.parametrize("nodes", [0, 1, 31, 32, 70])
def test_masks_of_several_words(nodes, layout):
    case = Case([5, 2], nodes + 1, layout=layout)
    case.check(tree_view(case))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [1, 2, 4, 9, 50])
def test_window_counts_positions_not_rows(window, layout):
    """A tree's row index runs ahead of its position: a window by rows would hide ancestors."""
    case = Case([6, 11], 20, layout=layout)
    case.check(tree_view(case), window=window)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_soft_cap_and_sinks(layout):
    case = Case([6, 3], 12, heads=4, kv_heads=2, layout=layout)
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0])
    case.check(tree_view(case), softcap=2.0)
    case.check(tree_view(case), sinks=sinks)
    case.check(tree_view(case), window=5, softcap=1.5, sinks=sinks)


@pytest.mark.parametrize("lens", [[0], [5], [0, 6]])
@pytest.mark.parametrize("queries", [1, 3, 10])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("layout", ["run", "scattered"])
def test_causal_rows_and_last_rows_only(lens, queries, window, layout):
    case = Case(lens, 10, layout=layout)
    case.check(causal_view(case, queries), window=window)


@pytest.mark.parametrize(
    "length, window, layout", [(0, None, "run"), (0, 20, "run"), (9, None, "halves"), (9, 50, "run")]
)
def test_prompts_of_many_rows(length, window, layout):
    """Beyond the rows that fold groups, the mask is shared by a group's heads instead."""
    case = Case([length], MOST_FOLDED_ROWS + 3, layout=layout)
    case.check(causal_view(case, case.fresh), window=window)


def test_frontier_sees_earlier_levels_of_its_own_branch():
    """Three levels of two nodes; the last level asks, each node along its own ancestors."""
    case = Case([4, 9], 6)
    seen = torch.zeros(2, 2, 6, dtype=torch.bool)
    seen[:, 0, [0, 3, 4]] = True
    seen[:, 1, [1, 2, 5]] = True
    positions = torch.tensor([0, 0, 1, 1, 2, 2]).expand(2, -1)
    view = TreeView(case.table, case.lens, positions, pack_bits(seen), 2)
    case.check(view)
    case.check(view, window=3)


def test_pages_are_runs():
    assert page_runs([]) == []
    assert page_runs([4]) == [Run(4, 1)]
    assert page_runs([3, 4, 5, 1, 0, 7, 8]) == [Run(3, 3), Run(1, 1), Run(0, 1), Run(7, 2)]
    # a slot's table ends in zeros
    assert page_runs([2, 3, 0, 0]) == [Run(2, 2), Run(0, 1), Run(0, 1)]


@pytest.mark.parametrize("length, rows", [(0, [0]), (3, [3]), (8, [8]), (9, [8, 1]), (12, [8, 4]), (14, [8, 4, 2])])
def test_runs_are_views_of_the_rows_in_use(length, rows):
    pool = torch.randn(6, PAGE, 1, 2)
    views = row_views(pool, [Run(2, 2), Run(0, 1), Run(5, 1)], length)
    assert [len(view) for view in views] == rows
    assert torch.equal(torch.cat(views), pool[[2, 3, 0, 5]].flatten(0, 1)[:length])
    assert all(view.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr() for view in views)


class Allocations(TorchDispatchMode):
    """Bytes of the largest storage that any operation makes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {a.untyped_storage().data_ptr() for a in _tensors([args, kwargs])}
        out = func(*args, **(kwargs or {}))
        fresh = (x for x in _tensors(out) if x.untyped_storage().data_ptr() not in given)
        self.most = max([self.most, *(x.untyped_storage().nbytes() for x in fresh)])
        return out


def _tensors(tree) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


@pytest.mark.parametrize("window, softcap", [(None, None), (30, None), (None, 2.0)])
def test_scattered_rows_are_never_gathered(window, softcap):
    """Catches: a copy of a slot's keys or values; what is made has the size of scores and mask."""
    case = Case([300], 5, heads=4, kv_heads=2, dim=64, value_dim=64, layout="scattered")
    view = tree_view(case)
    with Allocations() as made:
        tree_attention(case.query, case.keys, case.values, view, 0.1, window, softcap)
    assert 0 < made.most < case.rows[0][0].nbytes / 4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_error_is_within_twice_plain_torch(dtype, layout):
    case = Case([40], 17, heads=6, kv_heads=2, dim=32, value_dim=32, layout=layout, dtype=dtype)
    view = tree_view(case)
    exact = tree_attention(case.query.float(), case.keys.float(), case.values.float(), view, 0.2)
    ours = tree_attention(case.query, case.keys, case.values, view, 0.2)
    keys, values = (rows.repeat_interleave(3, 1).transpose(0, 1) for rows in case.rows[0])
    bias = view.bias(0, None, 1, torch.float32)
    assert bias is not None
    scores = (case.query[0].transpose(0, 1) @ keys.transpose(1, 2)).float() * 0.2 + bias
    plain = (scores.softmax(-1).to(dtype) @ values).transpose(0, 1)[None]
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max()
