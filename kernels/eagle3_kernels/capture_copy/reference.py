"""The definition of capture_copy."""

from torch import Tensor


def capture_copy(hidden: Tensor, out: Tensor, column: int, residual: Tensor | None = None) -> None:
    """Write hidden [T, H] (+ residual [T, H]) to rows :T, column block `column` of out [M, n * H].

    Raises:
        RuntimeError: more rows than the buffer has, or a block past its columns.
    """
    rows, width = hidden.shape
    block = slice(column * width, (column + 1) * width)
    if rows > out.shape[0] or block.stop > out.shape[1]:
        raise RuntimeError(
            f"hidden {tuple(hidden.shape)} at column block {column} exceeds the buffer {tuple(out.shape)}"
        )
    out[:rows, block].copy_(hidden if residual is None else hidden + residual)
