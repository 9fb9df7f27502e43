"""Attention of the training-time test: the causal prefix of step 0 plus the row's own keys of later steps."""

from eagle3_kernels.ttt_attention.blocked import ttt_attention

__all__ = ["ttt_attention"]
