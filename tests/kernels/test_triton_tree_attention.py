"""The tree_attention kernel against its reference and the formula in float64.

Catches: siblings seeing each other, windows by row, lost heads, a split that is dropped or counted twice, rows read
beyond a slot's end (they are NaN here), a launcher that asks the device for its lengths.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle3_kernels.bits import pack_bits
from eagle3_kernels.testing import device, error_budget, poisoned
from eagle3_kernels.tree_attention import TreeView, reference, tree_attention

kernel = pytest.importorskip("eagle3_kernels.tree_attention.kernel", reason="needs triton", exc_type=ImportError)

BF16, FP16 = torch.bfloat16, torch.float16
DIMS, GROUPS, NODES = (32, 64, 80, 96, 128), (1, 3, 6, 7, 8), (1, 3, 24, 60, 130)


@pytest.fixture(autouse=True)
def triton_kernels(monkeypatch):
    monkeypatch.setenv("EAGLE3_KERNELS", "triton")


@dataclass(frozen=True)
class Case:
    """Shapes of one call; `earlier` fresh rows come before the queries; `processors` decides the splits."""

    dim: int
    group: int
    nodes: int
    value_dim: int | None = None
    lens: tuple[int, ...] = (5,)
    kv_heads: int = 1
    earlier: int = 0
    page_size: int = 16
    tree: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    processors: int = 1
    seed: int = 0


@dataclass
class Inputs:
    query: Tensor
    keys: Tensor
    values: Tensor
    view: TreeView
    sinks: Tensor | None


def draw_tree(slots: int, fresh: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Levels [B, A] and ancestors, oneself included, bool [B, A, A], of trees with random parents."""
    levels = torch.zeros(slots, fresh, dtype=torch.int64)
    seen = torch.eye(fresh, dtype=torch.bool).repeat(slots, 1, 1)
    for row in range(1, fresh):
        for slot in range(slots):
            parent = int(torch.randint(max(0, row - 9), row, (1,), generator=draw))
            levels[slot, row] = levels[slot, parent] + 1
            seen[slot, row] |= seen[slot, parent]
    return levels, seen


def make(case: Case) -> Inputs:
    """Random inputs as the engine lays them out: heads before rows, scattered pages, a layer of two; NaN elsewhere."""
    draw, slots, fresh = torch.Generator().manual_seed(case.seed), len(case.lens), case.earlier + case.nodes
    value_dim, at = case.value_dim or case.dim, device()
    pages = (max(case.lens) + fresh - 1) // case.page_size + 1
    table = torch.randperm(slots * pages, generator=draw).view(slots, pages).int()
    pools = [
        torch.full((2, slots * pages, case.page_size, case.kv_heads, d), torch.nan, dtype=case.dtype)
        for d in (case.dim, value_dim)
    ]
    for slot, length in enumerate(case.lens):
        rows = torch.arange(length + fresh)
        for pool in pools:
            new = torch.randn(len(rows), case.kv_heads, pool.shape[-1], generator=draw)
            pool[1, table[slot, rows // case.page_size].long(), rows % case.page_size] = new.to(case.dtype)
    heads = case.group * case.kv_heads
    query = torch.randn(heads, slots * case.nodes, case.dim, generator=draw).to(case.dtype)
    if case.tree:
        levels, seen = draw_tree(slots, fresh, draw)
        mask = pack_bits(seen[:, case.earlier :]).to(at)
    else:
        levels, mask = torch.arange(fresh).expand(slots, -1), None
    wide = torch.cat([table, torch.zeros_like(table)], 1).to(at)
    view = TreeView(
        page_table=wide[:, :pages],
        lens=torch.tensor(case.lens, dtype=torch.int32, device=at),
        positions=levels.to(at),
        mask=mask,
        queries=case.nodes,
    )
    rows = query.to(at).transpose(0, 1).unflatten(0, (slots, case.nodes))
    sinks = torch.randn(heads, generator=draw).to(case.dtype).to(at) * 2 if case.sinks else None
    return Inputs(rows, pools[0].to(at)[1], pools[1].to(at)[1], view, sinks)


def formula(case: Case, inputs: Inputs, dtype: torch.dtype, backwards: bool = False) -> Tensor:
    """The formula over gathered rows: in float64 exact, else plain PyTorch; `backwards` adds up in the other order."""
    view, outputs = inputs.view, []
    for slot, queries in enumerate(inputs.query.to(dtype)):
        rows = torch.arange(view.length(slot), device=queries.device)
        pages, offsets = view.page_table[slot].long()[rows // inputs.keys.shape[1]], rows % inputs.keys.shape[1]
        key, value = (pool[pages, offsets].to(dtype) for pool in (inputs.keys, inputs.values))
        bias = view.bias(slot, case.window, 1, torch.float64)
        bias = torch.zeros(len(queries), len(rows), device=rows.device) if bias is None else bias
        if backwards:
            queries, key, value, bias = queries.flip(-1), key.flip(0, -1), value.flip(0), bias.flip(-1)
        group = queries.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        scores = torch.einsum("nhd,lhd->hnl", queries, key) / math.sqrt(case.dim)
        scores = scores if case.softcap is None else case.softcap * torch.tanh(scores / case.softcap)
        wide = torch.promote_types(dtype, torch.float32)
        scores = scores.to(wide) + bias.to(wide)
        if inputs.sinks is not None:
            scores = torch.cat([scores, inputs.sinks.to(wide)[:, None, None].expand(-1, len(queries), 1)], -1)
        weights = scores.softmax(-1)[..., : len(rows)].to(dtype)
        outputs.append(torch.einsum("hnl,lhd->nhd", weights, value))
    return torch.stack(outputs)


def attention(run: Callable[..., Tensor], case: Case, inputs: Inputs) -> Tensor:
    tensors = inputs.query, inputs.keys, inputs.values
    return run(*tensors, inputs.view, 1 / math.sqrt(case.dim), case.window, case.softcap, inputs.sinks)


def budget_of(case: Case, inputs: Inputs) -> float:
    """Twice plain PyTorch's largest error, in three orders of its sums: a few rows' largest is a matter of luck."""
    exact = formula(case, inputs, torch.float64)
    plain = [formula(case, inputs, case.dtype, backwards) for backwards in (False, True)]
    return max(error_budget(out, exact) for out in (attention(reference.tree_attention, case, inputs), *plain))


def check(case: Case, monkeypatch: pytest.MonkeyPatch, roundings: int = 0) -> None:
    """The kernel is within the budget of three draws, give or take some `roundings` of values and scores."""
    monkeypatch.setattr(kernel, "processors", lambda at: case.processors)
    inputs = make(case)
    with poisoned():
        ours = attention(tree_attention, case, inputs)
    # nothing was copied to the host, so this was no reference, either
    assert not {"_lens", "_runs"} & set(vars(inputs.view))
    exact = formula(case, inputs, torch.float64)
    assert ours.is_contiguous()
    assert (ours.shape, ours.dtype) == (exact.shape, case.dtype)
    others = [replace(case, seed=case.seed + 1000 * i) for i in (1, 2)]
    budget = max([budget_of(case, inputs), *(budget_of(other, make(other)) for other in others)])
    budget += roundings * torch.finfo(case.dtype).eps * (1 + exact.abs().max().item())
    off = (ours.double() - exact).abs()
    assert (off <= budget).all(), f"off by {off.max().item():.3g}, allowed {budget:.3g}"


def grid_case(i: int, j: int, k: int) -> Case:
    """Dim i, group j and nodes k of the grid, with the other choices spread over it."""
    turn = i + 2 * j + 3 * k
    return Case(
        DIMS[i],
        GROUPS[j],
        NODES[k],
        lens=((5,), (70, 0), (3,))[turn % 3] if k < 3 else (9,),
        kv_heads=1 if NODES[k] * GROUPS[j] > 200 else 2,
        # a page of 300 rows may hold enough for a split
        page_size=(16, 300, 7)[(i + j) % 3],
        # the interpreter is slow on the small tiles of float32
        dtype=(torch.float32 if k < 3 else BF16, BF16, FP16)[(j + k) % 3],
        processors=(1, 8)[turn % 2],
        seed=turn,
    )


@pytest.mark.parametrize("i, j, k", [(i, j, (i + j) % 5) for i in range(5) for j in range(5)])
def test_pairs_of_the_grid(i, j, k, monkeypatch):
    """Every pair of head dim, group and tree size, once."""
    check(grid_case(i, j, k), monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("k", range(5))
@pytest.mark.parametrize("j", range(5))
@pytest.mark.parametrize("i", range(5))
def test_the_grid(i, j, k, monkeypatch):
    check(replace(grid_case(i, j, k), dtype=(torch.float32, BF16, FP16)[(i + j + k) % 3]), monkeypatch)


ODD = Case(24, 3, 11, value_dim=40, lens=(33, 0), kv_heads=2, page_size=5)
# three splits
LONG = replace(ODD, nodes=2, lens=(400, 3), page_size=50, processors=64)


@pytest.mark.parametrize(
    "case",
    [
        replace(ODD, window=1),
        replace(ODD, window=4, dtype=BF16),
        replace(ODD, window=30),
        replace(LONG, window=300),
        replace(ODD, softcap=2.0),
        replace(LONG, softcap=50.0, dtype=FP16),
        replace(LONG, softcap=50.0, tree=False),
        replace(LONG, sinks=True),
        replace(ODD, sinks=True, softcap=3.0, window=9, dtype=BF16, page_size=64),
        # a chain, its last rows, a prompt of several tiles, one with a window
        replace(ODD, tree=False),
        replace(ODD, tree=False, nodes=2, earlier=9),
        replace(ODD, tree=False, nodes=70, lens=(0,)),
        replace(ODD, tree=False, nodes=70, lens=(3,), window=6, sinks=True, kv_heads=1),
        # a drafted frontier behind earlier levels
        replace(ODD, nodes=4, earlier=37),
        replace(ODD, nodes=4, earlier=37, window=3),
        # widths past those of the grid
        Case(192, 1, 5, value_dim=128, kv_heads=2, dtype=BF16, lens=(80,)),
        Case(256, 2, 5, dtype=BF16, lens=(80,)),
        Case(576, 16, 2, value_dim=512, dtype=BF16, lens=(30,)),
        Case(576, 4, 2, value_dim=512, lens=(9,)),
        Case(1, 1, 3, value_dim=3),
    ],
    ids=str,
)
def test_windows_caps_sinks_frontiers_and_widths(case, monkeypatch):
    check(case, monkeypatch)


@pytest.mark.parametrize("processors", [2, 9, 1000])
def test_any_number_of_splits(processors, monkeypatch):
    """A short slot beside a long one has splits without a key: they write nothing and count for nothing."""
    splits = []
    choose = kernel.choose_splits
    monkeypatch.setattr(kernel, "choose_splits", lambda *given: splits.append(choose(*given)) or splits[-1])
    check(Case(16, 2, 3, lens=(1300, 2), page_size=64, processors=processors), monkeypatch)
    assert splits == [min(processors, 10)]


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing_are_zero(sinks, monkeypatch):
    """Padded rows of a batch stay finite, whatever their neighbours see."""
    inputs = make(Case(16, 2, 5, lens=(0, 4), sinks=sinks))
    assert inputs.view.mask is not None
    inputs.view.mask[0, 3] = 0
    out = tree_attention(inputs.query, inputs.keys, inputs.values, inputs.view, 0.3, sinks=inputs.sinks)
    assert out[0, 3].eq(0).all()
    assert out.isfinite().all()
    assert out[0, 4].abs().min() > 0


@pytest.mark.filterwarnings("ignore:All-NaN")
def test_nan_of_a_query_stays_its_own():
    """A row that is not finite is seen as such, and by no other row."""
    inputs = make(Case(16, 2, 5, lens=(70,)))
    query = inputs.query.clone()
    query[0, 2, 1, 3] = torch.nan
    out = tree_attention(query, inputs.keys, inputs.values, inputs.view, 0.3)
    assert out[0, 2, 1].isnan().all()
    assert int(out.isnan().sum()) == 16


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_shape(data):
    """Property: whatever the shape, the kernel equals the formula but for rounding."""
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    case = Case(
        dim=number(1, 40),
        group=number(1, 8),
        nodes=number(1, 20),
        value_dim=number(1, 40),
        lens=tuple(data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=2))),
        kv_heads=number(1, 2),
        earlier=number(0, 20),
        # a page of 400 rows may hold enough for three splits
        page_size=pick(number(1, 70), 400),
        tree=pick(True, False),
        window=pick(None, number(1, 100)),
        softcap=pick(None, 0.5, 30.0),
        sinks=pick(False, True),
        processors=pick(1, 100),
        seed=number(0, 999),
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        # with a handful of values, twice the error of others is no bound
        check(case, monkeypatch, roundings=16)


@pytest.mark.parametrize("dim", [1, 15, 16, 17, 32, 80, 96, 100, 128, 192, 256, 576])
def test_a_width_is_two_powers_of_two(dim):
    main, rest = kernel.widths(dim)
    assert dim <= main + rest < max(17, 2 * dim)
    assert all(x == 0 or (x >= 16 and x & (x - 1) == 0) for x in (main, rest))
    assert (rest == 0) == (dim <= main)


@pytest.mark.parametrize(
    "programs, rows, keys, processors, expected",
    [
        # batch 1, 8 heads, 9 nodes in groups of four, 8k rows, on an H200: nearly two programs each
        (8, 36, 8192, 132, 28),
        (8, 1, 8192, 132, 33),
        # batch 32 fills it, and so does a prompt
        (256, 36, 8192, 132, 1),
        (512, 128, 8192, 132, 1),
        # short contexts, and a table wide enough for anything
        (8, 36, 200, 132, 1),
        (1, 1, 10**6, 132, 128),
    ],
)
def test_splits_fill_the_device(programs, rows, keys, processors, expected):
    assert kernel.choose_splits(programs, rows, keys, processors) == expected
