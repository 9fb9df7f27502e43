"""capture_copy in Triton: one pass over the rows, strided columns written in place."""

# pyright reads a launch as a plain call: constexpr parameters get plain values, num_warps is no parameter
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_kernels.capture_copy.reference import check_block
from eagle3_kernels.testing import TRITON_TYPES, Case

BLOCK = 1024


@triton.jit
def copy_block_kernel(
    hidden_ptr,  # [T, H] in the model's dtype, columns contiguous
    residual_ptr,  # like hidden, or None
    out_ptr,  # out[0, column * H]: the first element of the column block
    width,  # H
    hidden_stride,  # elements from a row of hidden to the next
    residual_stride,
    out_stride,
    BLOCK: tl.constexpr,
):
    """Program (row, block of columns) copies BLOCK values; a sum is made in fp32 or wider and rounded once."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(hidden_ptr + row * hidden_stride + columns, mask=inside)
    if residual_ptr is not None:
        other = tl.load(residual_ptr + row * residual_stride + columns, mask=inside)
        wide = tl.float64 if value.dtype == tl.float64 else tl.float32
        value = (value.to(wide) + other.to(wide)).to(value.dtype)
    tl.store(out_ptr + row * out_stride + columns, value.to(out_ptr.dtype.element_ty), mask=inside)


def capture_copy(hidden: Tensor, out: Tensor, column: int, residual: Tensor | None = None) -> None:
    """out[:T, column * H : (column + 1) * H] = hidden (+ residual), in place.

    Reads hidden [T, H] (and residual) once and writes T * H values; rows from T on and other columns stay untouched.

    Raises:
        RuntimeError: more rows than the buffer has, or a block past its columns.
    """
    check_block(hidden, out, column)
    rows, width = hidden.shape
    if not rows:
        return
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    if residual is not None:
        dtype = torch.promote_types(hidden.dtype, residual.dtype)
        hidden, residual = hidden.to(dtype), residual.to(dtype)
        residual = residual if residual.stride(1) == 1 else residual.contiguous()
    copy_block_kernel[rows, triton.cdiv(width, BLOCK)](
        hidden,
        residual,
        out[:, column * width :],
        width,
        hidden.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        BLOCK=BLOCK,
    )


COMPILE_CASES = [
    Case(
        f"{name} {TRITON_TYPES[dtype]}",
        copy_block_kernel,
        {
            "hidden_ptr": pointer,
            "out_ptr": pointer,
            "width": "i32",
            "hidden_stride": "i32",
            "residual_stride": "i32",
            "out_stride": "i32",
            **({"residual_ptr": pointer} if residual else {}),
        },
        {"BLOCK": BLOCK, **({} if residual else {"residual_ptr": None})},
        divisible=("width", "hidden_stride", "residual_stride", "out_stride"),
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for pointer in [f"*{TRITON_TYPES[dtype]}"]
    for name, residual in (("copy", False), ("add", True))
]
