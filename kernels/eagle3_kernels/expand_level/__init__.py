"""Grow the draft tree one level, and the frontier's mask with it."""

from eagle3_kernels.expand_level.reference import expand_level, grow_mask

__all__ = ["expand_level", "grow_mask"]
