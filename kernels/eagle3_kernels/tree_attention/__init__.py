"""Attention of tree rows over a paged cache and their own ancestors."""

from torch import Tensor

from eagle3_kernels.dispatch import uses_triton
from eagle3_kernels.tree_attention import reference
from eagle3_kernels.tree_attention.reference import formula_attention
from eagle3_kernels.tree_attention.view import TreeView

__all__ = ["TreeView", "formula_attention", "tree_attention"]


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    view: TreeView,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from tree rows to their slot's committed rows and their own ancestors.

    Args:
        query: [B, N, Hq, d].
        keys, values: pools [pages, page_size, Hkv, d] and [pages, page_size, Hkv, dv], fresh rows already written.
        window: a query at position p sees positions > p - window (positions, never rows).
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: per-head logits [Hq] that take softmax mass and give nothing.
    Returns:
        [B, N, Hq, dv] contiguous.
    """
    if uses_triton(query):
        from eagle3_kernels.tree_attention.kernel import tree_attention as run
    else:
        run = reference.tree_attention
    return run(query, keys, values, view, scaling, window, softcap, sinks)
