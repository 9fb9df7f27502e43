"""Copy a layer's hidden states into its columns of the feature buffer."""

from eagle3_kernels.capture_copy.reference import capture_copy

__all__ = ["capture_copy"]
