"""The draft head's loss against the teacher: lm_head, softmax and gradient in one pass, nothing [R, V] kept."""

from collections.abc import Mapping

from torch import Tensor

from eagle3_kernels.dispatch import uses_triton
from eagle3_kernels.draft_loss import fused
from eagle3_kernels.draft_loss.reference import DraftLoss
from eagle3_kernels.loss_terms import SOFT_CE

__all__ = ["DraftLoss", "draft_loss"]


def draft_loss(
    h: Tensor,
    weight: Tensor,
    teacher: Tensor,
    teacher_lse: Tensor,
    taught: Tensor,
    row_weights: Tensor,
    terms: Mapping[str, float] = SOFT_CE,
) -> DraftLoss:
    """Weighted loss of draft rows, differentiable once in `h` and `weight`; the terms are the reference's.

    Args:
        h: normed hidden states [M, H], rows of all TTT steps.
        weight: lm_head [Vd, H].
        teacher: the target's logits at the draft vocabulary's tokens [R, Vd]; several rows may share an entry.
        teacher_lse: log-sum-exp of the target's logits over its WHOLE vocabulary [R].
        taught: int64 [M], the teacher's entry for each row.
        row_weights: fp32 [M]; 0 = a row whose loss does not count.
        terms: name -> weight, at least one above 0.
    Raises:
        ValueError: an unknown term, a negative weight, no weight above 0.
    """
    if uses_triton(h):
        from eagle3_kernels.draft_loss.kernel import draft_loss as run
    else:
        run = fused.draft_loss
    return run(h, weight, teacher, teacher_lse, taught, row_weights, terms)
