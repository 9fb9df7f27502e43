"""Choose the final tree among all candidates and link it."""

from collections.abc import Sequence

from torch import Tensor

from eagle3_kernels.build_tree import reference
from eagle3_kernels.dispatch import uses_triton
from eagle3_kernels.structures import Level, Tree

__all__ = ["build_tree", "link_tree"]


def build_tree(
    roots: Tensor,
    levels: Sequence[Level],
    nodes: int,
    max_level: Tensor | None = None,
    limit: Tensor | None = None,
) -> Tree:
    """The best `nodes` of all candidates below each root, as a linked tree.

    Candidates are ordered by (-score, level, index). What an edge adds to a score is <= 0, so a parent never scores
    below its child and stands earlier at a tie: every prefix of that order is closed under parents. A score of -inf
    is no candidate; fewer candidates than `nodes` give a smaller tree.

    Args:
        roots: target ids [B].
        levels: drafted levels, their tokens as target ids.
        nodes: draft nodes wanted (root excluded).
        max_level: deepest level allowed per slot [B]; None = all.
        limit: draft nodes allowed per slot [B], where fewer than `nodes`; None = all.
    """
    if uses_triton(roots):
        from eagle3_kernels.build_tree import kernel

        return kernel.build_tree(roots, levels, nodes, max_level, limit)
    return reference.build_tree(roots, levels, nodes, max_level, limit)


def link_tree(
    count: Tensor,
    tokens: Tensor,
    parent: Tensor,
    scores: Tensor,
    depth: int,
    edges: Tensor | None = None,
    source: Tensor | None = None,
) -> Tree:
    """Positions, ancestor masks and child links of trees given by their parents [B, N] (-1 root and unused)."""
    if uses_triton(parent):
        from eagle3_kernels.build_tree import kernel

        return kernel.link_tree(count, tokens, parent, scores, depth, edges, source)
    return reference.link_tree(count, tokens, parent, scores, depth, edges, source)
