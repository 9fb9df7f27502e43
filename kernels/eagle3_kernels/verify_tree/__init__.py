"""Walk the tree along the target's own tokens."""

from eagle3_kernels.verify_tree.reference import Choose, verify_tree

__all__ = ["Choose", "verify_tree"]
