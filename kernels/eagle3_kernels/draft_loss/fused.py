"""Draft loss whose gradient is made in the forward pass, chunk by chunk: memory linear in M, never [M, Vd].

With z = h W^T and row weight w:   dz = w (softmax(z) - p)      dh = dz W      dW = dz^T h
"""

import torch
from torch import Tensor

from eagle3_kernels.draft_loss.reference import DraftLoss

CHUNK = 512


def draft_loss(
    h: Tensor, weight: Tensor, teacher: Tensor, teacher_lse: Tensor, taught: Tensor, row_weights: Tensor
) -> DraftLoss:
    """See `draft_loss_reference`: same arguments, same result, differentiable in `h` and `weight`."""
    return DraftLoss(*_DraftLoss.apply(h, weight, teacher, teacher_lse, taught, row_weights, torch.is_grad_enabled()))


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, teacher, teacher_lse, taught, row_weights, grad_enabled):
        # needs_input_grad alone is true inside no_grad too
        wants_grad = grad_enabled and any(ctx.needs_input_grad[:2])
        w = weight.to(h.dtype)
        row_loss, alpha = (torch.empty(len(h), dtype=torch.float32, device=h.device) for _ in range(2))
        prediction = torch.empty(len(h), dtype=torch.int64, device=h.device)
        d_h = torch.empty_like(h) if wants_grad else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_grad else None
        for start in range(0, len(h), CHUNK):
            at = slice(start, start + CHUNK)
            z, t = (h[at] @ w.T).float(), teacher[taught[at]].float()
            prediction[at] = z.argmax(-1)
            z_lse, t_lse = z.logsumexp(-1, keepdim=True), t.logsumexp(-1, keepdim=True)
            p = (t - t_lse).exp_()
            row_loss[at] = z_lse.squeeze(-1) - (p * z).sum(-1)
            q = z.sub_(z_lse).exp_()
            inside = (t_lse - teacher_lse[taught[at], None]).exp_()
            alpha[at] = torch.minimum(p * inside, q).sum(-1)
            if d_h is not None and d_weight is not None:
                d_z = q.sub_(p).mul_(row_weights[at, None]).to(h.dtype)
                d_h[at] = d_z @ w
                d_weight += d_z.T @ h[at]
        ctx.save_for_backward(d_h, d_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(row_loss, prediction, alpha)
        return (row_loss * row_weights).sum(), row_loss, prediction, alpha

    @staticmethod
    def backward(ctx, grad, *_others):
        d_h, d_weight = ctx.saved_tensors
        return (d_h.float() * grad).to(d_h.dtype), (d_weight * grad).to(ctx.weight_dtype), *[None] * 5
