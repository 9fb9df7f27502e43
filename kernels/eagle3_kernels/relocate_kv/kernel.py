"""relocate_kv in Triton: all layers of a model's keys and values in one launch."""

# pyright reads a launch as a plain call: constexpr parameters get plain values, num_warps is no parameter
# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_kernels.testing import TRITON_TYPES, Case

BLOCK = 512
# rows that a program holds in registers between reading and writing
HELD = 8


@triton.jit
def relocate_rows_kernel(
    first_ptr,  # pool [layers, pages, page_size, heads, dim], contiguous
    second_ptr,  # another one of the same layers and pages, or None
    table_ptr,  # pages of each slot [B, P]
    lens_ptr,  # committed rows [B]
    path_ptr,  # accepted tree rows [B, rows], -1 padded, ascending
    table_stride,
    path_stride,
    first_width,  # heads * dim of a row
    second_width,
    first_layer_stride,
    second_layer_stride,
    rows,  # D + 1
    first_parts,  # programs of a slot that belong to the first pool
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):
    """Program (slot, part): a part is BLOCK columns of one layer of one pool."""
    slot = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    table = table_ptr + slot * table_stride
    path = path_ptr + slot * path_stride
    length = tl.load(lens_ptr + slot).to(tl.int64)
    if second_ptr is None or part < first_parts:
        _move(first_ptr, part, first_width, first_layer_stride, table, path, length, rows, PAGE_SIZE, BLOCK, HELD)
    else:
        part -= first_parts
        _move(second_ptr, part, second_width, second_layer_stride, table, path, length, rows, PAGE_SIZE, BLOCK, HELD)


@triton.jit
def _move(
    pool_ptr,
    part,
    width,
    layer_stride,
    table,
    path,
    length,
    rows,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):
    """HELD rows are read, then written, then the next ones.

    A path ascends, so row i is written from path[i] >= i: no later row reads what an earlier one wrote. A column is
    read and written by one thread, so the order of the program's own instructions is enough.
    """
    blocks = tl.cdiv(width, BLOCK)
    columns = part % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    base = pool_ptr + (part // blocks).to(tl.int64) * layer_stride + columns
    for start in range(0, rows, HELD):
        held = ()
        for i in tl.static_range(HELD):
            source = tl.load(path + start + i, mask=start + i < rows, other=-1)
            at = base + _pool_row(table, length + source, source > start + i, PAGE_SIZE) * width
            held = held + (tl.load(at, mask=inside & (source > start + i)),)  # noqa: RUF005 (triton has no unpacking)
        for i in tl.static_range(HELD):
            source = tl.load(path + start + i, mask=start + i < rows, other=-1)
            at = base + _pool_row(table, length + start + i, source > start + i, PAGE_SIZE) * width
            tl.store(at, held[i], mask=inside & (source > start + i))


@triton.jit
def _pool_row(table, row, moved, PAGE_SIZE: tl.constexpr):
    page = tl.load(table + row // PAGE_SIZE, mask=moved, other=0).to(tl.int64)
    return page * PAGE_SIZE + row % PAGE_SIZE


def relocate_kv(pools: Sequence[Tensor], page_table: Tensor, lens: Tensor, path: Tensor) -> None:
    """pool[:, row(lens + i)] = pool[:, row(lens + path[i])] for every i with path[i] > i, in place.

    Reads and writes each moved row of each layer once; rows that stay are neither read nor written. The pools go two by
    two, a layer group's keys with its values: one launch for a model whose layers are alike. (A table of pointers on
    the device would serve any number of pools, but has to be copied there, and loses their alignment.)

    Args:
        pools: keys and values of like layers [layers, pages, page_size, heads, dim], contiguous; see the reference.
        page_table: pages of each slot [B, P], rows contiguous.
        lens: committed rows of each slot [B]; its tree rows follow them.
        path: accepted tree rows [B, D + 1], -1 padded; ascending, as parents come before children.
    Raises:
        ValueError: a pool is not contiguous.
    """
    if wrong := [tuple(pool.stride()) for pool in pools if not pool.is_contiguous()]:
        raise ValueError(f"relocate_kv moves rows of contiguous pools, got strides {wrong}")
    page_table, path = _unit_columns(page_table), _unit_columns(path)
    if not path.shape[0]:
        return
    for at in range(0, len(pools), 2):
        _relocate_pair(pools[at], pools[at + 1] if at + 1 < len(pools) else None, page_table, lens.contiguous(), path)


def _relocate_pair(first: Tensor, second: Tensor | None, page_table: Tensor, lens: Tensor, path: Tensor) -> None:
    widths = [0 if pool is None else pool[0, 0, 0].numel() for pool in (first, second)]
    parts = [
        0 if pool is None else pool.shape[0] * triton.cdiv(width, BLOCK)
        for pool, width in zip((first, second), widths, strict=True)
    ]
    relocate_rows_kernel[path.shape[0], sum(parts)](
        first,
        second,
        page_table,
        lens,
        path,
        page_table.stride(0),
        path.stride(0),
        *widths,
        first.stride(0),
        0 if second is None else second.stride(0),
        path.shape[1],
        parts[0],
        PAGE_SIZE=first.shape[2],
        BLOCK=BLOCK,
        HELD=HELD,
    )


def _unit_columns(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


COMPILE_CASES = [
    Case(
        f"pair {TRITON_TYPES[dtype]}",
        relocate_rows_kernel,
        {
            "first_ptr": f"*{TRITON_TYPES[dtype]}",
            "second_ptr": f"*{TRITON_TYPES[dtype]}",
            "table_ptr": "*i32",
            "lens_ptr": "*i32",
            "path_ptr": "*i32",
            "table_stride": "i32",
            "path_stride": "i32",
            "first_width": "i32",
            "second_width": "i32",
            "first_layer_stride": "i64",
            "second_layer_stride": "i64",
            "rows": "i32",
            "first_parts": "i32",
        },
        {"PAGE_SIZE": 16, "BLOCK": BLOCK, "HELD": HELD},
        divisible=("first_width", "second_width", "first_layer_stride", "second_layer_stride"),
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
