"""Copy a layer's hidden states into its columns of the feature buffer."""

from torch import Tensor

from eagle3_kernels.capture_copy import reference
from eagle3_kernels.dispatch import uses_triton

__all__ = ["capture_copy"]


def capture_copy(hidden: Tensor, out: Tensor, column: int, residual: Tensor | None = None) -> None:
    """Write hidden [T, H] (+ residual [T, H]) to rows :T, column block `column` of out [M, n * H].

    Raises:
        RuntimeError: more rows than the buffer has, or a block past its columns.
    """
    if uses_triton(hidden):
        from eagle3_kernels.capture_copy import kernel

        kernel.capture_copy(hidden, out, column, residual)
    else:
        reference.capture_copy(hidden, out, column, residual)
