"""The definition of the draft loss: soft cross-entropy over the draft vocabulary. Slow, obvious."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class DraftLoss(NamedTuple):
    """loss: scalar fp32, summed over rows; prediction: int64 [R], the draft's argmax; alpha: fp32 [R]."""

    loss: Tensor
    prediction: Tensor
    alpha: Tensor


def draft_loss_reference(h: Tensor, weight: Tensor, teacher: Tensor, teacher_lse: Tensor) -> DraftLoss:
    """-sum_rows sum_v p_v log q_v with q = softmax(h W^T), p = softmax(teacher) over the draft vocabulary.

    Args:
        h: normed hidden states [R, H].
        weight: lm_head [Vd, H].
        teacher: the target's logits at the draft vocabulary's tokens [R, Vd].
        teacher_lse: log-sum-exp of the target's logits over its WHOLE vocabulary [R], for alpha only:
            alpha = sum_v min(p_v, q_v) with p un-renormalised, the chance that a sampled draft is accepted.
    """
    log_q = F.log_softmax((h @ weight.T.to(h.dtype)).float(), dim=-1)
    p = teacher.float().softmax(-1)
    full = (teacher.float() - teacher_lse[:, None]).exp()
    return DraftLoss(-(p * log_q).sum(), log_q.argmax(-1), full.minimum(log_q.detach().exp()).sum(-1))
