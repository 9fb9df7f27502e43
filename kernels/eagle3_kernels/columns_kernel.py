"""Rows of any width in Triton, whose blocks are powers of two: a width is cut in two of them (80 = 64 + 16)."""

import triton
import triton.language as tl


def widths(dim: int) -> tuple[int, int]:
    """A width as two powers of two: 80 = 64 + 16, 96 = 64 + 32, 576 = 512 + 64; 0 = none."""
    main = max(16, 1 << (dim.bit_length() - 1))
    return main, max(16, power_of_two(dim - main)) if dim > main else 0


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@triton.jit
def load_columns(rows, first, width: tl.constexpr, block: tl.constexpr):
    """Columns first .. first + block - 1 of rows (pointers [R]) that are `width` wide; zero beyond."""
    columns = first + tl.arange(0, block)
    at = rows[:, None] + columns[None, :]
    if first + block > width:
        loaded = tl.load(at, mask=(columns < width)[None, :], other=0.0)
    else:
        loaded = tl.load(at)
    return loaded


@triton.jit
def store_columns(rows, valid, first, value, width: tl.constexpr, block: tl.constexpr):
    """Write such columns of the rows that are valid, in the dtype of the pointers."""
    columns = first + tl.arange(0, block)
    seen = valid[:, None] & (columns < width)[None, :]
    tl.store(rows[:, None] + columns[None, :], value.to(rows.dtype.element_ty), mask=seen)


@triton.jit
def load_row(rows, width: tl.constexpr, main: tl.constexpr, rest: tl.constexpr):
    """Rows in their two parts [R, main], [R, rest]; without a rest the main part twice."""
    first = load_columns(rows, 0, width, main)
    second = first
    if rest > 0:
        second = load_columns(rows, main, width, rest)
    return first, second


@triton.jit
def store_row(rows, valid, first, second, width: tl.constexpr, main: tl.constexpr, rest: tl.constexpr):
    """Write the two parts of valid rows."""
    store_columns(rows, valid, 0, first, width, main)
    if rest > 0:
        store_columns(rows, valid, main, second, width, rest)


@triton.jit
def zero_row(count: tl.constexpr, main: tl.constexpr, rest: tl.constexpr):
    """Two parts of fp32 zeros."""
    first = tl.zeros([count, main], tl.float32)
    second = first
    if rest > 0:
        second = tl.zeros([count, rest], tl.float32)
    return first, second


@triton.jit
def product(left, left_rest, right, right_rest, rest: tl.constexpr):
    """left [M, d] times the transpose of right [N, d], both in two parts -> fp32 [M, N]."""
    total = tl.dot(left, tl.trans(right), input_precision="ieee")
    if rest > 0:
        total = tl.dot(left_rest, tl.trans(right_rest), total, input_precision="ieee")
    return total


@triton.jit
def inner(left, left_rest, right, right_rest, rest: tl.constexpr):
    """Inner products of rows of left and right [M, d], both in two parts -> fp32 [M]."""
    total = tl.sum(left.to(tl.float32) * right.to(tl.float32), 1)
    if rest > 0:
        total += tl.sum(left_rest.to(tl.float32) * right_rest.to(tl.float32), 1)
    return total


@triton.jit
def add_product(total, total_rest, weights, right, right_rest, rest: tl.constexpr):
    """total [M, d] + weights [M, N] times right [N, d], in two parts."""
    total = tl.dot(weights, right, total, input_precision="ieee")
    if rest > 0:
        total_rest = tl.dot(weights, right_rest, total_rest, input_precision="ieee")
    return total, total_rest


@triton.jit
def add_scaled(total, total_rest, factors, right, right_rest, rest: tl.constexpr):
    """total [M, d] + factors [M] times the rows of right [M, d], in two parts."""
    total += factors[:, None] * right.to(tl.float32)
    if rest > 0:
        total_rest += factors[:, None] * right_rest.to(tl.float32)
    return total, total_rest


@triton.jit
def scaled(total, total_rest, factors, rest: tl.constexpr):
    """Rows of total [M, d], in two parts, times factors [M]. What there is none of stays untouched in a loop."""
    total *= factors[:, None]
    if rest > 0:
        total_rest *= factors[:, None]
    return total, total_rest
