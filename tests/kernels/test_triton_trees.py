"""Tree kernels against their references: catches ties that go to the higher index, ranks lost where chunks meet,
NaN that hides, bits past a word, and a wait for the device."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3_kernels import build_tree as build_op
from eagle3_kernels import dispatch, ordering
from eagle3_kernels import expand_level as expand_op
from eagle3_kernels.build_tree import reference as build_reference
from eagle3_kernels.expand_level import reference as expand_reference
from eagle3_kernels.structures import Level, Tree
from eagle3_kernels.testing import device as device_under_test
from eagle3_kernels.testing import poisoned
from oracles.drafted import draw_levels, draw_log_q

pytest.importorskip("triton")
from eagle3_kernels import ordering_kernel
from eagle3_kernels.build_tree import kernel as build_kernel
from eagle3_kernels.expand_level import kernel as expand_kernel

quick = settings(max_examples=25, deadline=None, derandomize=True)
DEVICE = device_under_test()
INF, NAN = float("inf"), float("nan")
KINDS = ["random", "tied", "saturated", "all zero"]
FEW_VALUES = [-INF, -2.0, -0.5, -0.0, 0.0, 0.5, INF, NAN, -NAN]


def on(value, device) -> Any:
    """Tensors moved, inside levels and lists, too."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Level):
        return Level(*(on(field, device) for field in value))
    return [on(item, device) for item in value] if isinstance(value, list) else value


def assert_same(actual, expected) -> None:
    """Types, shapes and values, NaN where NaN is expected, -0.0 apart from 0.0."""
    if isinstance(expected, Tensor):
        actual = actual.cpu()
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        if expected.is_floating_point():
            real = ~expected.isnan()
            assert torch.equal(actual.signbit()[real], expected.signbit()[real])
    elif isinstance(expected, Level):
        for got, wanted in zip(actual, expected, strict=True):
            assert_same(got, wanted)
    elif isinstance(expected, Tree):
        for field in fields(Tree):
            assert_same(getattr(actual, field.name), getattr(expected, field.name))
    else:
        assert actual == expected


def run(op, *arguments, **named):
    """A kernel's launcher on the device under test, its outputs poisoned beforehand."""
    with poisoned():
        return op(*on(list(arguments), DEVICE), **{name: on(value, DEVICE) for name, value in named.items()})


# top-k


def row_kinds(size: int, seed: int = 0) -> Tensor:
    """Rows [10, size]: random, rounded, equal, rising, falling below 0, infinite, with NaN of both signs, near 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(10, size, generator=generator) * 3
    x[1], x[2] = x[1].round(), 1.5
    x[3], x[4] = x[3].sort().values, -1 - x[4].abs().sort().values
    x[5].masked_fill_(torch.rand(size, generator=generator) < 0.9, -INF)
    x[6, torch.randint(0, size, (3,), generator=generator)] = -NAN
    x[7, torch.randint(0, size, (20,), generator=generator)] = NAN
    x[8] = torch.zeros(size) * torch.randn(size, generator=generator)
    x[9] = torch.finfo(torch.float32).tiny / 4 * torch.randn(size, generator=generator).round()
    return x


def check_topk(x: Tensor, k: int) -> None:
    best, index = ordering.stable_topk(x, k)
    actual, at = run(ordering_kernel.stable_topk, x, k)
    assert_same(at, index)
    assert_same(actual, best)


@pytest.mark.parametrize(
    "size, k, dtype",
    [
        (1, 1, torch.float32),
        (5, 5, torch.float16),
        (128, 3, torch.bfloat16),
        (1025, 10, torch.float32),
        (2048, 1, torch.bfloat16),
        (2049, 8, torch.float32),
        (4097, 4, torch.float16),
    ],
)
def test_topk_is_the_references(size, k, dtype):
    x = row_kinds(size).to(dtype)
    # the interpreter reads subnormal bf16 as 0
    rows = 9 if dtype == torch.bfloat16 and DEVICE.type == "cpu" else 10
    check_topk(x[:rows], k)


@pytest.mark.full
@pytest.mark.parametrize(
    "size, k", [(64, 64), (1024, 17), (1025, 4), (2050, 10), (32000, 1), (32000, 10), (32000, 64), (151936, 10)]
)
def test_topk_of_whole_vocabularies(size, k):
    """Of long rows a few: random, rounded, with NaN."""
    rows = slice(None) if size < 4096 else [0, 1, 7]
    check_topk(row_kinds(size, seed=k)[rows], k)


def test_rows_need_not_lie_side_by_side():
    x = row_kinds(70)
    check_topk(x[:, 3:50], 6)
    check_topk(x.t()[:9], 4)


@quick
@given(
    st.sampled_from([FEW_VALUES, FEW_VALUES[:4], [-INF, -3.0, NAN]]), st.integers(1, 100), st.integers(1, 12), st.data()
)
def test_chunks_meet_without_loss(values, size, k, data):
    """Chunks of 16 and tiles of 16: equal values, NaN and -inf on both sides of every border."""
    drawn = torch.randint(
        0, len(values), (size,), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordering_kernel, "TILE", 16)
        patch.setattr(ordering_kernel, "LEAST_CHUNK", 16)
        check_topk(torch.tensor(values)[drawn], min(k, size))


@pytest.mark.parametrize("rows, size", [(1, 1), (1, 2047), (10, 32000), (320, 32000), (1, 152064), (5000, 152064)])
def test_chunks_cover_a_row(rows, size):
    chunk, parts = ordering_kernel.chunks(rows, size)
    assert chunk % ordering_kernel.TILE == 0
    assert chunk * (parts - 1) < size <= chunk * parts
    assert parts == 1 or (parts - 1) * rows < ordering_kernel.PROGRAMS


# expand_level


def check_level(keys: Tensor, scores: Tensor, k: int, **policy) -> None:
    expected = expand_reference.expand_level(keys, scores, k, **policy)
    assert_same(run(expand_kernel.expand_level, keys, scores, k, **policy), expected)


@pytest.mark.parametrize(
    "kind, slots, rows, vocab, k",
    [
        ("random", 2, 1, 40, 8),
        ("tied", 2, 3, 40, 3),
        ("saturated", 1, 4, 9, 4),
        ("all zero", 3, 2, 2, 5),
        ("tied", 1, 2, 2100, 2),
        ("random", 3, 1, 1, 1),
    ],
)
def test_level_is_the_references(kind, slots, rows, vocab, k):
    generator = torch.Generator().manual_seed(vocab)
    scores = -torch.rand(slots, rows, generator=generator)
    scores[0, rows // 2] = -INF
    check_level(draw_log_q(kind, (slots, rows, vocab), generator), scores, k)


def test_level_under_a_score_policy():
    keys = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(1))
    scores = -torch.rand(2, 3)
    check_level(keys, scores, 4, edge=lambda best: best.clamp(max=0) - 1, weigh=lambda edges: edges * 0.5)
    # a broadcast view
    check_level(keys, scores, 4, edge=lambda best: torch.arange(4).neg().float().to(best.device).expand_as(best))


def test_a_head_that_is_not_finite_is_seen():
    keys = torch.randn(2, 2, 30)
    keys[0, 1, 7], keys[1, 0, :] = NAN, -NAN
    check_level(keys, torch.tensor([[0.0, -INF], [-1.0, NAN]]), 3)


@pytest.mark.full
@pytest.mark.parametrize(
    "kind, slots, rows, vocab, k",
    [
        ("tied", 1, 10, 32000, 10),
        ("random", 4, 1, 32000, 8),
        ("tied", 1, 64, 100, 64),
        ("saturated", 1, 3, 152064, 3),
        ("all zero", 2, 8, 4000, 8),
    ],
)
def test_levels_of_the_engines_size(kind, slots, rows, vocab, k):
    generator = torch.Generator().manual_seed(k)
    check_level(draw_log_q(kind, (slots, rows, vocab), generator), -torch.rand(slots, rows, generator=generator), k)


# grow_mask


@quick
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 3), st.booleans(), st.integers(0, 10**6))
def test_mask_is_the_references(widths, slots, dirty, seed):
    """Over word borders, with what lies past the rows left out."""
    generator = torch.Generator().manual_seed(seed)
    mask, rows, above = None, 0, 1
    for width in widths:
        parents = torch.randint(0, above, (slots, width), generator=generator)
        expected = expand_reference.grow_mask(mask, parents, rows)
        assert_same(run(expand_kernel.grow_mask, mask, parents, rows), expected)
        mask, rows, above = expected, rows + width, width
        if dirty and rows % 32:
            mask = mask.clone()
            mask[..., -1] |= -1 << rows % 32


def test_mask_of_three_words():
    parents = torch.arange(70).flip(0)[None]
    mask = expand_reference.grow_mask(None, torch.zeros(1, 70, dtype=torch.int64), 0)
    assert_same(run(expand_kernel.grow_mask, mask, parents, 70), expand_reference.grow_mask(mask, parents, 70))


# build_tree


def check_tree(roots: Tensor, levels: list[Level], nodes: int, **limits: Tensor | None) -> Tree:
    expected = build_reference.build_tree(roots, levels, nodes, **limits)
    assert_same(run(build_kernel.build_tree, roots, levels, nodes, **limits), expected)
    return expected


@st.composite
def drafts(draw) -> tuple[list[Level], int, dict[str, Tensor | None]]:
    """Levels of mixed kinds, some not finite; how many nodes; what each slot allows."""
    slots, depth, top_k = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    levels = draw_levels(draw(st.sampled_from(KINDS)), slots, depth, top_k, draw(st.integers(1, 6)), seed=depth)
    if draw(st.booleans()):
        spoilt = draw(st.integers(0, depth - 1))
        scores = levels[spoilt].scores.clone()
        scores[0, draw(st.integers(0, scores.shape[1] - 1))] = draw(st.sampled_from([NAN, -NAN, -INF]))
        levels[spoilt] = levels[spoilt]._replace(scores=scores)
    per_slot = st.none() | st.lists(st.integers(0, 8), min_size=slots, max_size=slots).map(torch.tensor)
    return levels, draw(st.integers(0, 60)), {"max_level": draw(per_slot), "limit": draw(per_slot)}


@quick
@given(drafts())
def test_tree_is_the_references(drafted):
    levels, nodes, limits = drafted
    check_tree(torch.arange(len(levels[0].tokens)) + 7, levels, nodes, **limits)


@pytest.mark.parametrize("kind", KINDS)
def test_tree_of_more_than_one_word(kind):
    tree = check_tree(torch.zeros(2), draw_levels(kind, 2, 12, 3, 20, seed=5), 80)
    assert tree.ancestor_mask.shape[-1] == 3


def test_candidates_whose_parent_is_not_finite_keep_their_row():
    levels = draw_levels("random", 1, 3, 2, 9, seed=0)
    scores = torch.full_like(levels[1].scores, NAN)
    check_tree(torch.tensor([3]), [levels[0], levels[1]._replace(scores=scores), levels[2]], 8)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "depth, top_k, nodes", [(1, 1, 1), (6, 1, 6), (1, 8, 3), (12, 8, 59), (10, 10, 130), (40, 1, 40), (4, 16, 255)]
)
def test_trees_of_the_engines_size(kind, depth, top_k, nodes):
    levels = draw_levels(kind, 3, depth, top_k, 40, seed=5)
    check_tree(torch.arange(3), levels, nodes, max_level=torch.tensor([depth, 0, 2]), limit=torch.tensor([99, 3, 7]))


# link_tree


@quick
@given(st.integers(1, 70), st.integers(0, 4), st.integers(0, 10**6))
def test_links_are_the_references(used, unused, seed):
    """Any parents, also walks that the depth cuts short."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(used)
    parent = (torch.rand(2, used, generator=generator) * rows).long()
    parent[1] = (rows - 1 - torch.randint(0, 3, (used,), generator=generator)).clamp(min=0)
    parent[:, 0] = -1
    parent = torch.nn.functional.pad(parent, (0, unused), value=-1)
    depth = int(torch.randint(0, used + 1, (1,), generator=generator))
    arguments = torch.full((2,), used), parent * 3, parent, torch.zeros(parent.shape), depth
    assert_same(run(build_kernel.link_tree, *arguments), build_reference.link_tree(*arguments))


# dispatch


@pytest.fixture
def triton_chosen():
    dispatch.set_kernels("triton")
    yield
    dispatch.set_kernels(None)


def test_public_ops_run_the_kernels(triton_chosen, monkeypatch):
    ran = []
    for module, name in (
        (expand_kernel, "expand_level"),
        (expand_kernel, "grow_mask"),
        (build_kernel, "build_tree"),
        (build_kernel, "link_tree"),
    ):
        launch = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, name=name, launch=launch: (ran.append(name), launch(*a))[1])
    keys = on(torch.randn(1, 1, 20), DEVICE)
    level = expand_op.expand_level(keys, keys.new_zeros(1, 1), 2)
    expand_op.grow_mask(None, level.frontier_parents, 0)
    tree = build_op.build_tree(on(torch.tensor([4]), DEVICE), [level], 2)
    build_op.link_tree(tree.count, tree.tokens, tree.parent, tree.scores, 1)
    assert ran == ["expand_level", "grow_mask", "build_tree", "link_tree", "link_tree"]


def test_more_children_than_the_kernel_keeps_run_in_torch(triton_chosen, monkeypatch):
    monkeypatch.delattr(expand_kernel, "stable_topk")
    keys = torch.randn(1, 1, 90)
    expected = expand_reference.expand_level(keys, torch.zeros(1, 1), 65)
    assert_same(expand_op.expand_level(on(keys, DEVICE), on(torch.zeros(1, 1), DEVICE), 65), expected)


class NoHostRead(TorchDispatchMode):
    """Fails on what makes the host wait for a device's values."""

    waits = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.waits, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def draft_a_round(expand, grow, build, slots: int = 2) -> Tree:
    """Two levels and their tree."""
    keys = on(torch.randn(slots, 2, 20, generator=torch.Generator().manual_seed(0)), DEVICE)
    roots, limit = (on(torch.full((slots,), value), DEVICE) for value in (5, 3))
    with NoHostRead():
        first = expand(keys[:, :1], keys.new_zeros(slots, 1), 2)
        mask = grow(None, first.frontier_parents, 0)
        second = expand(keys, first.frontier_scores, 2)
        grow(mask, second.frontier_parents, 2)
        return build(roots, [first, second], 4, limit, limit)


def test_nothing_waits_for_the_device():
    tree = draft_a_round(expand_kernel.expand_level, expand_kernel.grow_mask, build_kernel.build_tree)
    assert tree.count.tolist() == [4, 4]
    # the reference does wait, and the check sees it
    with pytest.raises(AssertionError, match="waits"):
        draft_a_round(expand_reference.expand_level, expand_reference.grow_mask, build_reference.build_tree)


def test_a_difference_in_any_field_is_seen():
    tree = build_reference.build_tree(torch.tensor([1]), draw_levels("random", 1, 2, 2, 9, seed=0), 4)
    for field in fields(Tree):
        value = getattr(tree, field.name)
        with pytest.raises(AssertionError):
            assert_same(replace(tree, **{field.name: value + 1}), tree)
