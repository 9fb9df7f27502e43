"""The definition of capture_copy."""

from torch import Tensor


def capture_copy(hidden: Tensor, out: Tensor, column: int, residual: Tensor | None = None) -> None:
    """Write hidden [T, H] (+ residual [T, H]) to rows :T, column block `column` of out [M, n * H].

    Raises:
        RuntimeError: more rows than the buffer has, or a block past its columns.
    """
    check_block(hidden, out, column)
    rows, width = hidden.shape
    block = slice(column * width, (column + 1) * width)
    out[:rows, block].copy_(hidden if residual is None else hidden + residual)


def check_block(hidden: Tensor, out: Tensor, column: int) -> None:
    """Whether the rows and the column block lie inside the buffer."""
    rows, width = hidden.shape
    if rows > out.shape[0] or (column + 1) * width > out.shape[1]:
        raise RuntimeError(
            f"hidden {tuple(hidden.shape)} at column block {column} exceeds the buffer {tuple(out.shape)}"
        )
