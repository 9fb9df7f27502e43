"""Elementwise parts of the head that keep for the backward pass only what they cannot make again.

y = w x r, r = 1 / sqrt(mean x^2 + eps), n = x r:    dx = r (g - n mean(g n)), g = w dy      dw = sum dy n
y = silu(a) b, s = sigmoid(a):                       da = dy b s (1 + a (1 - s))             db = dy a s
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] over the root of its mean square, times weight [H]; in fp32 whatever x's dtype, which it returns."""
    # CUDA's own keeps as little; without gradients nothing is kept
    if x.is_cuda or not torch.is_grad_enabled():
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    return _RMSNorm.apply(x, weight, eps)


def silu_times(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b"""
    return _SiluTimes.apply(a, b) if torch.is_grad_enabled() else F.silu(a) * b


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        exact = x.float()
        scale = (torch.linalg.vecdot(exact, exact).unsqueeze(-1) / x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (exact * scale).mul_(weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed, grad = x.float() * scale, grad.float()
        d_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        d_x = None
        if ctx.needs_input_grad[0]:
            d_normed = grad * weight.float()
            share = torch.linalg.vecdot(d_normed, normed).unsqueeze(-1) / x.shape[-1]
            d_x = d_normed.sub_(normed.mul_(share)).mul_(scale).to(x.dtype)
        return d_x, d_weight, None


class _SiluTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return F.silu(a).mul_(b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * b, a), F.silu(a).mul_(grad)
