"""The definition of the draft loss: terms between the teacher and the draft, by autograd. Slow, obvious."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_kernels.loss_terms import SOFT_CE, check_terms


class DraftLoss(NamedTuple):
    """loss: scalar fp32, the weighted sum over rows; row_loss: fp32 [M], the mix of terms of each row, not weighted by
    row_weights, without gradient; prediction: int64 [M], the draft's argmax; alpha: fp32 [M], the chance that a
    sampled draft is accepted."""

    loss: Tensor
    row_loss: Tensor
    prediction: Tensor
    alpha: Tensor


def draft_loss_reference(
    h: Tensor,
    weight: Tensor,
    teacher: Tensor,
    teacher_lse: Tensor,
    taught: Tensor,
    row_weights: Tensor,
    terms: Mapping[str, float] = SOFT_CE,
) -> DraftLoss:
    """sum_m row_weights_m * sum_name terms[name] * term_name(row m), with q = softmax(h W^T) over the draft vocabulary.

    p is the teacher's distribution renormalised over the draft vocabulary, P the same not renormalised (its sum is the
    teacher's mass there), alpha = sum_v min(P_v, q_v) (Leviathan et al., 2211.17192, section 3.2):

        soft_ce     -sum p log q                kl          sum p (log p - log q)
        hard_ce     -log q[argmax p]            reverse_kl  sum q (log q - log p)
        tv          1 - alpha                   lk_alpha    -log alpha
        lk_lambda   l kl + (1 - l) tv, l = exp(-3 alpha) held constant

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
    check_terms(terms)
    log_q = F.log_softmax(_exact(h @ weight.T.to(h.dtype)), dim=-1)
    t = _exact(teacher)[taught]
    rows = _Rows(t.log_softmax(-1), (t - teacher_lse[taught, None]).exp(), log_q)
    row_loss = torch.stack([weight * getattr(rows, name)() for name, weight in terms.items()]).sum(0)
    return DraftLoss((row_loss * row_weights).sum(), row_loss.detach(), log_q.argmax(-1), rows.alpha().detach())


class _Rows(NamedTuple):
    """The distributions of M rows, each [M, Vd]; every method is a term [M]."""

    log_p: Tensor
    full_p: Tensor
    log_q: Tensor

    def alpha(self) -> Tensor:
        return self.full_p.minimum(self.log_q.exp()).sum(-1)

    def soft_ce(self) -> Tensor:
        return -(self.log_p.exp() * self.log_q).sum(-1)

    def kl(self) -> Tensor:
        return (self.log_p.exp() * (self.log_p - self.log_q)).sum(-1)

    def reverse_kl(self) -> Tensor:
        return (self.log_q.exp() * (self.log_q - self.log_p)).sum(-1)

    def tv(self) -> Tensor:
        return 1 - self.alpha()

    def lk_alpha(self) -> Tensor:
        # a row whose alpha underflows has a large loss and no gradient
        return -self.alpha().clamp(min=torch.finfo(self.log_q.dtype).tiny).log()

    def lk_lambda(self) -> Tensor:
        keep = (-3 * self.alpha().detach()).exp()
        return keep * self.kl() + (1 - keep) * self.tv()

    def hard_ce(self) -> Tensor:
        return -self.log_q.gather(-1, self.log_p.argmax(-1, keepdim=True)).squeeze(-1)


def _exact(x: Tensor) -> Tensor:
    """fp32, or fp64 where the inputs are."""
    return x if x.dtype == torch.float64 else x.float()
