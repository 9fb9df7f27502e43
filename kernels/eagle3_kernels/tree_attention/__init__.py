"""Attention of tree rows over a paged cache and their own ancestors."""

from eagle3_kernels.tree_attention.reference import formula_attention, tree_attention
from eagle3_kernels.tree_attention.view import TreeView

__all__ = ["TreeView", "formula_attention", "tree_attention"]
