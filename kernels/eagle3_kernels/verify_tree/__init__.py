"""Walk the tree along what the target, or a rejection rule, accepts."""

from eagle3_kernels.verify_tree.reference import Decide, match, verify_tree

__all__ = ["Decide", "match", "verify_tree"]
