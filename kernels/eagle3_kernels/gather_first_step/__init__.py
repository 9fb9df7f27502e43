"""Inputs of the first draft step over newly committed tokens."""

from torch import Tensor

from eagle3_kernels.dispatch import uses_triton
from eagle3_kernels.gather_first_step import reference
from eagle3_kernels.structures import FirstStep, Tree, Walk

__all__ = ["gather_first_step"]


def gather_first_step(tree: Tree, walk: Walk, starts: Tensor) -> FirstStep:
    """Pair the feature of every newly committed row with the token that follows it (the head's left shift).

    Args:
        starts: feature-buffer row of each slot's root [B]; its tree rows follow.
    Returns:
        Accepted drafts + 1 real rows per slot; padding repeats the root's row with token 0.
    """
    if uses_triton(starts):
        from eagle3_kernels.gather_first_step import kernel

        return kernel.gather_first_step(tree, walk, starts)
    return reference.gather_first_step(tree, walk, starts)
