"""Move the K/V rows of an accepted path to the end of the committed ones."""

from eagle3_kernels.relocate_kv.reference import relocate_kv

__all__ = ["relocate_kv"]
