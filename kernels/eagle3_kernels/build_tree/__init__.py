"""Choose the final tree among all candidates and link it."""

from eagle3_kernels.build_tree.reference import build_tree, link_tree

__all__ = ["build_tree", "link_tree"]
