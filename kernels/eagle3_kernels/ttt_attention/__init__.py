"""Attention of the training-time test: the causal prefix of step 0 plus the row's own keys of later steps."""

from torch import Tensor

from eagle3_kernels.dispatch import uses_triton
from eagle3_kernels.ttt_attention import blocked

__all__ = ["ttt_attention"]


def ttt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    rows: Tensor,
    lengths: list[int],
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """What row t of TTT step k sees, in memory linear in T, differentiable in the five tensors.

    Args:
        query: [Hq, R, d], step k's queries of the rows `rows`.
        key, value: [Hkv, T, d], [Hkv, T, dv], step-0 keys of the packed documents.
        own_key, own_value: [k, Hkv, R, d], [k, Hkv, R, dv]: the rows' keys of steps 1..k (k = 0: none).
        rows: int64 [R], ascending.
        lengths: tokens of each document, summing to T.
        window: positions that a query looks back (its own included); None = all.
    Returns:
        [R, Hq, dv] contiguous.
    """
    if uses_triton(query):
        from eagle3_kernels.ttt_attention.kernel import ttt_attention as run
    else:
        run = blocked.ttt_attention
    return run(query, key, value, own_key, own_value, rows, lengths, scaling, window)
