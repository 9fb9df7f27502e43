"""Draft loss whose gradient is made in the forward pass, chunk by chunk: memory linear in M, never [M, Vd].

With z = h W^T and dz the gradient of rows.py:      dh = dz W      dW = dz^T h
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from eagle3_kernels.draft_loss.reference import DraftLoss
from eagle3_kernels.draft_loss.rows import RowLoss, loss_rows
from eagle3_kernels.loss_terms import SOFT_CE, check_terms

# logits of one round of the three products: on a CPU, and on a GPU, where each round adds to all of dW
CHUNK, GPU_CHUNK = 1 << 21, 1 << 26
RowsOp = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Mapping[str, float], bool], RowLoss]


def draft_loss(
    h: Tensor,
    weight: Tensor,
    teacher: Tensor,
    teacher_lse: Tensor,
    taught: Tensor,
    row_weights: Tensor,
    terms: Mapping[str, float] = SOFT_CE,
) -> DraftLoss:
    """See `draft_loss_reference`: same arguments, same result, differentiable once in `h` and `weight`."""
    logits = CHUNK if h.device.type == "cpu" else GPU_CHUNK
    return loss_by_chunks(loss_rows, logits, h, weight, teacher, teacher_lse, taught, row_weights, terms)


def loss_by_chunks(rows: RowsOp, logits: int, h: Tensor, weight: Tensor, *rest: Any) -> DraftLoss:
    """`draft_loss` by any implementation of rows.py's `loss_rows`, on about so many logits at a time."""
    check_terms(rest[-1])
    return DraftLoss(*_DraftLoss.apply(h, weight, *rest, rows, logits, torch.is_grad_enabled()))


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, teacher, teacher_lse, taught, row_weights, terms, rows, logits, grad_enabled):
        # needs_input_grad is true inside no_grad too
        wants_h, wants_weight = (grad_enabled and wanted for wanted in ctx.needs_input_grad[:2])
        w, (vocab, size) = weight.to(h.dtype), weight.shape
        row_loss, alpha = (torch.empty(len(h), dtype=torch.float32, device=h.device) for _ in range(2))
        prediction = torch.empty(len(h), dtype=torch.int64, device=h.device)
        d_h = torch.empty_like(h) if wants_h else None
        d_weight = torch.zeros(vocab, size, dtype=torch.float32, device=h.device) if wants_weight else None
        chunk = max(1, logits // vocab)
        buffer = h.new_empty(min(chunk, len(h)), vocab)
        for start in range(0, len(h), chunk):
            at = slice(start, start + chunk)
            z = buffer[: len(h[at])]
            _multiply(h[at], w, z)
            row_loss[at], prediction[at], alpha[at] = rows(
                z, teacher, teacher_lse, taught[at], row_weights[at], terms, wants_h or wants_weight
            )
            if d_h is not None:
                torch.mm(z, w, out=d_h[at])
            if d_weight is not None:
                _add_product(d_weight, z.T, h[at])
        ctx.d_h, ctx.d_weight, ctx.weight_dtype = d_h, d_weight, weight.dtype
        ctx.mark_non_differentiable(row_loss, prediction, alpha)
        return (row_loss * row_weights).sum(), row_loss, prediction, alpha

    @staticmethod
    def backward(ctx, grad, *_others):
        if ctx.d_h is ctx.d_weight is None:
            raise RuntimeError("draft_loss: its gradients were handed out by the first backward; run the forward again")
        # scaled in place and let go of: a copy of d_weight would be the largest tensor of a training step
        d_h, d_weight = ctx.d_h, ctx.d_weight
        ctx.d_h = ctx.d_weight = None
        d_h = None if d_h is None else d_h.mul_(grad)
        d_weight = None if d_weight is None else d_weight.mul_(grad).to(ctx.weight_dtype)
        return d_h, d_weight, *[None] * 8


def _multiply(h: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = h W^T"""
    # on a CPU in fp32, MKL is a tenth faster on this many columns than on 8192
    columns = 1024 if h.device.type == "cpu" and h.dtype == torch.float32 else len(weight)
    for start in range(0, len(weight), columns):
        at = slice(start, start + columns)
        torch.mm(h, weight[at].T, out=out[:, at])


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, summed in fp32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)
