"""Inputs of the training ops at a model's shapes, and torch's own ways to the same result; what the benchmark runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from eagle3_kernels.dispatch import kernels
from eagle3_kernels.draft_loss import draft_loss
from eagle3_kernels.traffic import Model
from eagle3_kernels.training_traffic import Packed
from eagle3_kernels.ttt_attention import ttt_attention
from eagle3_kernels.workloads import Work


class TrainingPlace(NamedTuple):
    """Where and in which numbers inputs are made."""

    device: torch.device
    dtype: torch.dtype
    model: Model
    batch: Packed

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype, requires_grad=True)


class Attention(NamedTuple):
    """A way to the output [R, Hq, d], and the tensors that it is differentiable in."""

    tensors: list[Tensor]
    forward: Callable[[], Tensor]


def attentions(at: TrainingPlace) -> tuple[Attention, Attention]:
    """TTT attention by our op and by FlexAttention, on the same numbers."""
    model, batch = at.model, at.batch
    rows, scaling = batch.rows().to(at.device), model.head_dim**-0.5
    # as projections leave them: rows before heads
    shapes = ((len(rows), model.heads), *[(batch.tokens, model.kv_heads)] * 2)
    tensors = [at.random(*shape, model.head_dim) for shape in shapes]
    tensors += [at.random(batch.step, model.kv_heads, len(rows), model.head_dim) for _ in range(2)]
    lengths = [batch.length] * batch.documents

    def ours() -> Tensor:
        query, key, value, own_key, own_value = tensors
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        return ttt_attention(query, key, value, own_key, own_value, rows, lengths, scaling)

    return Attention(tensors, ours), flex_ttt([x.detach() for x in tensors], rows, batch)


def flex_ttt(tensors: list[Tensor], rows: Tensor, batch: Packed) -> Attention:
    """FlexAttention over step-0 and own keys laid side by side: neither that copy nor the mask is counted."""
    query, *step_0 = (x.transpose(0, 1) for x in tensors[:3])
    own = (x.transpose(0, 1).flatten(1, 2) for x in tensors[3:])
    keys, values = (torch.cat(pair, 1) for pair in zip(step_0, own, strict=True))
    tokens, count = batch.tokens, len(rows)

    def visible(b, h, q, k):
        inside = (k <= rows[q]) & (k // batch.length == rows[q] // batch.length)
        return torch.where(k < tokens, inside, (k - tokens) % count == q)

    mask = create_block_mask(visible, None, None, count, keys.shape[1], device=str(rows.device))
    # compiled for a GPU only: its formula is what a CPU checks, where it knows no gradients
    flex: Any = torch.compile(flex_attention, dynamic=False) if rows.is_cuda else flex_attention
    leaves = [x[None].contiguous().requires_grad_(rows.is_cuda) for x in (query, keys, values)]
    return Attention(leaves, lambda: flex(*leaves, block_mask=mask, enable_gqa=True)[0].transpose(0, 1))


def work_ttt_forward(at: TrainingPlace) -> Work:
    ours, flex = attentions(at)
    return Work(ours.forward, {"FlexAttention": flex.forward})


def work_ttt_backward(at: TrainingPlace) -> Work:
    """Gradients of an output that was made before, by whatever is chosen when it is first asked for."""
    ours, flex = attentions(at)
    cotangent, outputs = torch.randn_like(ours.tensors[0]).detach(), {}

    def backward(name: str, way: Attention) -> tuple[Tensor, ...]:
        if name not in outputs:
            outputs[name] = way.forward()
        return torch.autograd.grad(outputs[name], way.tensors, cotangent, retain_graph=True)

    own = {"FlexAttention": lambda: backward("flex", flex)} if at.device.type == "cuda" else {}
    return Work(lambda: backward(kernels(), ours), own)


def work_draft_loss(at: TrainingPlace) -> Work:
    """Forward and backward: the op makes its gradients in the forward."""
    model, entries = at.model, len(at.batch.rows())
    taught = torch.arange(entries, device=at.device).repeat(at.batch.step + 1)
    h, weight = at.random(len(taught), model.hidden), at.random(model.draft_vocab, model.hidden)
    # fp32, as trainable weights are
    weight = (weight.detach().float() / model.hidden**0.5).requires_grad_()
    teacher = 3 * at.random(entries, model.draft_vocab).detach()
    lse, weights = teacher.float().logsumexp(-1) + 0.1, torch.full((len(taught),), 1e-3, device=at.device)

    def ours() -> tuple[Tensor, ...]:
        return torch.autograd.grad(draft_loss(h, weight, teacher, lse, taught, weights).loss, (h, weight))

    def eager() -> tuple[Tensor, ...]:
        losses = F.cross_entropy(
            (h @ weight.to(h.dtype).T).float(), teacher.float().softmax(-1)[taught], reduction="none"
        )
        return torch.autograd.grad((losses * weights).sum(), (h, weight))

    return Work(ours, {"cross_entropy": eager})


TRAINING_WORKS: dict[str, Callable[[TrainingPlace], Work]] = {
    "ttt_forward": work_ttt_forward,
    "ttt_backward": work_ttt_backward,
    "draft_loss": work_draft_loss,
}
