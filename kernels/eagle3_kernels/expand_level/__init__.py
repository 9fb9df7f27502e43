"""Grow the draft tree one level, and the frontier's mask with it."""

from collections.abc import Callable

from torch import Tensor

from eagle3_kernels.dispatch import uses_triton
from eagle3_kernels.expand_level import reference
from eagle3_kernels.structures import Level

__all__ = ["expand_level", "grow_mask"]


def expand_level(
    keys: Tensor,
    scores: Tensor,
    k: int,
    edge: Callable[[Tensor], Tensor] | None = None,
    weigh: Callable[[Tensor], Tensor] | None = None,
) -> Level:
    """Give each frontier node its k best children, then keep the k best of them all to be expanded next.

    More than 64 children per node run in torch on every device.

    Args:
        keys: what ranks a node's children [B, M, V], float32.
        scores: path scores of the frontier [B, M], float32; -inf marks padding, whose children are -inf too.
        k: children per node and nodes per level; clamped to what exists.
        edge: keys of the children [B, M, k] -> edge scores, log of each child's estimated acceptance, <= 0;
            None = the keys are edge scores (draft log-probabilities).
        weigh: edge scores [B, M, k] -> what they add to path scores, <= 0; None = themselves.
    Returns:
        A level whose tokens index V; equal scores keep the lower flat index.
    """
    if uses_triton(keys):
        from eagle3_kernels.expand_level import kernel

        if k <= kernel.MOST_K:
            return kernel.expand_level(keys, scores, k, edge, weigh)
    return reference.expand_level(keys, scores, k, edge, weigh)


def grow_mask(mask: Tensor | None, parents: Tensor, rows: int) -> Tensor:
    """Mask of a new frontier over the drafted rows: each node sees its parent's ancestors and itself.

    Args:
        mask: the frontier above [B, M', W'] over `rows` rows, or None at the first level.
        parents: frontier rows of the parents [B, M].
        rows: drafted rows before this level; the new nodes take rows, rows + 1, ...
    Returns:
        int32 [B, M, ceil((rows + M) / 32)].
    """
    if uses_triton(parents):
        from eagle3_kernels.expand_level import kernel

        return kernel.grow_mask(mask, parents, rows)
    return reference.grow_mask(mask, parents, rows)
