"""The definition of the draft loss: soft cross-entropy over the draft vocabulary. Slow, obvious."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class DraftLoss(NamedTuple):
    """loss: scalar fp32, the weighted sum over rows; row_loss: fp32 [M], unweighted, without gradient;
    prediction: int64 [M], the draft's argmax; alpha: fp32 [M], the chance that a sampled draft is accepted."""

    loss: Tensor
    row_loss: Tensor
    prediction: Tensor
    alpha: Tensor


def draft_loss_reference(
    h: Tensor, weight: Tensor, teacher: Tensor, teacher_lse: Tensor, taught: Tensor, row_weights: Tensor
) -> DraftLoss:
    """sum_m w_m * (-sum_v p_v log q_v) with q = softmax(h W^T), p = softmax(teacher) over the draft vocabulary.

    Args:
        h: normed hidden states [M, H], rows of all TTT steps.
        weight: lm_head [Vd, H].
        teacher: the target's logits at the draft vocabulary's tokens [R, Vd]; several rows may share an entry.
        teacher_lse: log-sum-exp of the target's logits over its WHOLE vocabulary [R], for alpha only:
            alpha = sum_v min(p_v, q_v) with p un-renormalised.
        taught: int64 [M], the teacher's entry for each row.
        row_weights: fp32 [M]; 0 = a row whose loss does not count.
    """
    log_q = F.log_softmax((h @ weight.T.to(h.dtype)).float(), dim=-1)
    p = teacher.float().softmax(-1)[taught]
    full = (teacher.float() - teacher_lse[:, None]).exp()[taught]
    rows = -(p * log_q).sum(-1)
    alpha = full.minimum(log_q.detach().exp()).sum(-1)
    return DraftLoss((rows * row_weights).sum(), rows.detach(), log_q.argmax(-1), alpha)
