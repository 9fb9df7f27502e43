"""capture_copy, relocate_kv and gather_first_step in Triton against their references: the same integers, the same bits.

Catches: columns of a neighbour overwritten, rows read after they were written, pages of another slot, a padded window
that leaves its buffer.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle3_kernels import capture_copy as capture_op
from eagle3_kernels import gather_first_step as first_step_op
from eagle3_kernels import relocate_kv as relocate_op
from eagle3_kernels.structures import Tree, Walk
from eagle3_kernels.testing import device, poisoned

pytest.importorskip("triton")
capture_kernel, relocate_kernel, first_step_kernel = (
    pytest.importorskip(f"eagle3_kernels.{op}.kernel") for op in ("capture_copy", "relocate_kv", "gather_first_step")
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
few = settings(max_examples=15, deadline=None, derandomize=True)


def random(*shape: int, dtype=torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device(), dtype)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equality under which NaN equals NaN."""
    return torch.equal(first.nan_to_num(nan=12345.0), second.nan_to_num(nan=12345.0))


def captured(op, hidden: Tensor, residual: Tensor | None, column: int, buffer_dtype: torch.dtype) -> Tensor:
    out = torch.full((hidden.shape[0] + 2, hidden.shape[1] * 3), torch.nan, dtype=buffer_dtype, device=device())
    op.capture_copy(hidden, out, column, residual)
    return out


def check_capture(rows: int, width: int, dtype: torch.dtype, residual: bool, column: int, strided: bool) -> None:
    hidden, other = (random(rows, width * 2, dtype=dtype, seed=seed) for seed in (1, 2))
    hidden, other = (x[:, ::2] if strided else x[:, :width] for x in (hidden, other))
    inputs = hidden, other if residual else None, column
    assert same_bits(
        captured(capture_kernel, *inputs, buffer_dtype=dtype),
        captured(capture_op.reference, *inputs, buffer_dtype=dtype),
    )


@pytest.mark.parametrize(
    "rows, width, dtype, residual, column, strided",
    [
        (1, 1, torch.float32, False, 0, False),
        (3, 80, torch.bfloat16, True, 2, False),
        (5, 1024, torch.float16, True, 1, True),
        (2, 1500, torch.bfloat16, False, 1, True),
        (7, 33, torch.float32, True, 2, True),
        (0, 16, torch.float32, False, 0, False),
    ],
)
def test_capture_copy(rows, width, dtype, residual, column, strided):
    check_capture(rows, width, dtype, residual, column, strided)


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 64, 1023, 1024, 1025, 4096])
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("column", [0, 2])
def test_capture_copy_grid(rows, width, dtype, residual, column):
    check_capture(rows, width, dtype, residual, column, strided=False)


@few
@given(st.integers(0, 6), st.integers(1, 70), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 2), st.booleans())
def test_capture_copy_of_any_shape(rows, width, dtype, residual, column, strided):
    check_capture(rows, width, dtype, residual, column, strided)


@pytest.mark.parametrize("hidden, residual", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_capture_copy_sums_in_the_wider_dtype_and_rounds_to_the_buffers(hidden, residual):
    inputs = random(4, 40, dtype=hidden, seed=1), random(4, 40, dtype=residual, seed=2), 1
    for buffer in DTYPES:
        kernel, reference = (captured(op, *inputs, buffer) for op in (capture_kernel, capture_op.reference))
        assert same_bits(kernel, reference)


@pytest.mark.parametrize("rows, column", [(6, 0), (2, 3)])
def test_capture_copy_refuses_to_overrun(rows, column):
    out = torch.zeros(5, 6, device=device())
    with pytest.raises(RuntimeError, match="exceeds the buffer"):
        capture_kernel.capture_copy(torch.ones(rows, 2, device=device()), out, column)
    assert not out.any()


@dataclass
class Relocation:
    """Pools whose rows are all different, and a path per slot."""

    pools: list[Tensor]
    table: Tensor
    lens: Tensor
    path: Tensor

    @classmethod
    def draw(cls, slots: int, nodes: int, depth: int, page: int, dtype: torch.dtype, dims, layers: int, seed: int):
        draw = torch.Generator().manual_seed(seed)
        lens = torch.randint(0, 3 * page, (slots,), generator=draw)
        per_slot = (3 * page + nodes) // page + 1
        table = torch.randperm(slots * per_slot, generator=draw).view(slots, per_slot).int()
        path = torch.full((slots, depth + 1), -1, dtype=torch.int32)
        for slot in range(slots):
            accepted = int(torch.randint(0, min(depth, nodes) + 1, (1,), generator=draw))
            rows = (torch.randperm(nodes, generator=draw)[:accepted] + 1).sort().values
            path[slot, : accepted + 1] = torch.cat([torch.zeros(1, dtype=torch.int64), rows])
        pools = [
            random(layers, slots * per_slot, page, heads, dim, dtype=dtype, seed=seed + i)
            for i, (heads, dim) in enumerate(dims)
        ]
        return cls(pools, table.to(device()), lens.to(device()), path.to(device()))

    def moved_by(self, op) -> list[Tensor]:
        pools = [pool.clone() for pool in self.pools]
        op.relocate_kv(pools, self.table, self.lens, self.path)
        return pools


def check_relocation(case: Relocation) -> None:
    for kernel, reference in zip(case.moved_by(relocate_kernel), case.moved_by(relocate_op.reference), strict=True):
        assert torch.equal(kernel, reference)


# slots, nodes, depth, page size, dtype, (heads, dim) of keys, values, ..., layers
RELOCATIONS = [
    (1, 4, 4, 16, torch.float32, [(1, 32), (1, 32)], 1),
    (3, 24, 6, 4, torch.bfloat16, [(2, 80), (2, 80)], 2),
    (2, 60, 9, 7, torch.float16, [(3, 192), (3, 128)], 2),
    (2, 60, 20, 1, torch.bfloat16, [(2, 8), (2, 8), (1, 12), (1, 20)], 3),
    (4, 8, 3, 5, torch.float32, [(1, 1)], 2),
]


@pytest.mark.parametrize("slots, nodes, depth, page, dtype, dims, layers", RELOCATIONS)
def test_relocate_kv(slots, nodes, depth, page, dtype, dims, layers):
    check_relocation(Relocation.draw(slots, nodes, depth, page, dtype, dims, layers, seed=3))


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 80, 96, 128])
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("nodes, depth", [(3, 2), (60, 7), (130, 16)])
@pytest.mark.parametrize("page", [1, 6, 16])
def test_relocate_kv_grid(dtype, dim, heads, nodes, depth, page):
    check_relocation(Relocation.draw(2, nodes, depth, page, dtype, [(heads, dim), (heads, dim)], 2, seed=5))


@few
@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(0, 18),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12)), min_size=1, max_size=3),
    st.integers(0, 10**6),
)
def test_relocate_kv_of_any_path(slots, nodes, depth, page, dims, seed):
    check_relocation(Relocation.draw(slots, nodes, depth, page, torch.float32, dims, 2, seed))


def test_relocate_kv_moves_a_chain_of_overlapping_rows():
    """Every row's source is the next row's destination, over more rows than a program holds at once."""
    case = Relocation.draw(1, 30, 25, 4, torch.float32, [(1, 16), (1, 16)], 1, seed=0)
    case.path[0] = torch.arange(1, 27)
    case.path[0, 0] = 0
    check_relocation(case)


def test_relocate_kv_writes_nothing_for_a_path_without_gaps():
    case = Relocation.draw(2, 8, 4, 4, torch.float32, [(1, 16), (1, 16)], 1, seed=0)
    case.path[:] = torch.tensor([[0, 1, 2, 3, -1], [0, -1, -1, -1, -1]])
    for kernel, before in zip(case.moved_by(relocate_kernel), case.pools, strict=True):
        assert torch.equal(kernel, before)


def test_relocate_kv_refuses_strided_pools():
    pool = torch.zeros(1, 4, 4, 2, 8, device=device())[..., ::2]
    slot = torch.zeros(1, 4, dtype=torch.int32, device=device())
    with pytest.raises(ValueError, match="contiguous pools"):
        relocate_kernel.relocate_kv([pool], slot, slot[:, 0], slot)


def draw_walk(slots: int, nodes: int, depth: int, seed: int) -> tuple[Tree, Walk, Tensor]:
    """A legal walk over rows with distinct tokens, packed as verify_tree packs it."""
    draw = torch.Generator().manual_seed(seed)
    packed = torch.full((slots, depth + 3), -1, dtype=torch.int32)
    for slot in range(slots):
        accepted = int(torch.randint(0, min(depth, nodes) + 1, (1,), generator=draw))
        rows = (torch.randperm(nodes, generator=draw)[:accepted] + 1).sort().values
        packed[slot, : accepted + 1] = torch.cat([torch.zeros(1, dtype=torch.int64), rows])
        packed[slot, -2:] = torch.tensor([accepted, 900 + slot])
    tokens = torch.randint(0, 128256, (slots, nodes + 1), generator=draw).int().to(device())
    unused = torch.zeros_like(tokens)
    tree = Tree(unused[:, 0], tokens, unused, unused, unused[..., None], unused, unused, unused.float(), depth)
    packed = packed.to(device())
    starts = torch.randint(0, 2**40, (slots,), generator=draw).to(device())
    return tree, Walk(packed[:, :-2], packed[:, -2], packed[:, -1]), starts


def check_first_step(slots: int, nodes: int, depth: int, seed: int, index: torch.dtype = torch.int64) -> None:
    tree, walk, starts = draw_walk(slots, nodes, depth, seed)
    starts = starts if index == torch.int64 else (starts % 1000).to(index)
    with poisoned():
        kernel = first_step_kernel.gather_first_step(tree, walk, starts)
    for name, actual, expected in zip(
        kernel._fields, kernel, first_step_op.reference.gather_first_step(tree, walk, starts), strict=True
    ):
        assert actual.dtype == expected.dtype, name
        assert torch.equal(actual, expected), name


@pytest.mark.parametrize("slots, nodes, depth", [(1, 1, 0), (1, 7, 7), (4, 60, 6), (33, 3, 2)])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_gather_first_step(slots, nodes, depth, index):
    check_first_step(slots, nodes, depth, 1, index)


@few
@given(st.integers(1, 5), st.integers(1, 60), st.integers(0, 17), st.integers(0, 10**6))
def test_gather_first_step_of_any_walk(slots, nodes, depth, seed):
    check_first_step(slots, nodes, depth, seed)
