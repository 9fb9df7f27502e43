"""Walk the tree along the target's own tokens."""

from eagle3_kernels.verify_tree.reference import verify_tree, walk_slot

__all__ = ["verify_tree", "walk_slot"]
