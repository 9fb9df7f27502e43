"""The draft head's loss against the teacher: lm_head, softmax and gradient in one pass, nothing [R, V] kept."""

from eagle3_kernels.draft_loss.fused import draft_loss
from eagle3_kernels.draft_loss.reference import DraftLoss

__all__ = ["DraftLoss", "draft_loss"]
