"""Inputs of the first draft step over newly committed tokens."""

from eagle3_kernels.gather_first_step.reference import gather_first_step

__all__ = ["gather_first_step"]
