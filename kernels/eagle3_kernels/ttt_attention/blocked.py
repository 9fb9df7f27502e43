"""TTT attention in memory linear in T: blocks of queries, log-sum-exp kept, scores recomputed backwards.

With s the scores, P = softmax(s), O = P V and D = sum(dO * O) over the value dim:
    dV = P^T dO        dP = dO V^T        ds = P * (dP - D)        dQ = scaling ds K        dK = scaling ds^T Q
The own keys are one column per step, each row's alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256


@dataclass(frozen=True)
class _Block:
    """Queries [first, last) of one document, whose keys they see are [start, stop)."""

    queries: slice
    keys: slice
    hidden: Tensor  # [b, stop - start] bool, true where a query must not look


def ttt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    rows: Tensor,
    lengths: list[int],
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """See `ttt_attention_reference`: same arguments, same result, differentiable in the five tensors."""
    return _TTTAttention.apply(query, key, value, own_key, own_value, rows, lengths, scaling, window)


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, own_key, own_value, rows, lengths, scaling, window):
        groups = query.shape[0] // key.shape[0]
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        for block in _blocks(rows, lengths, own_key.shape[0], window):
            q = _grouped(query[:, block.queries], groups)
            prefix, own = _scores(q, key[:, block.keys], own_key[:, :, block.queries], block, scaling, window)
            part = torch.logaddexp(prefix.logsumexp(-1), own.logsumexp(-1)) if own.shape[-1] else prefix.logsumexp(-1)
            o = _weighted((prefix - part[..., None]).exp().to(value.dtype), value[:, block.keys])
            if own.shape[-1]:
                weights = (own - part[..., None]).exp().to(value.dtype)
                o = o + torch.einsum("hgbk,khbd->hgbd", weights, own_value[:, :, block.queries])
            out[:, block.queries], lse[:, block.queries] = o.flatten(0, 1), part.flatten(0, 1)
        ctx.save_for_backward(query, key, value, own_key, own_value, rows, out, lse)
        ctx.lengths, ctx.scaling, ctx.window = lengths, scaling, window
        return out.transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx, grad):
        query, key, value, own_key, own_value, rows, out, lse = ctx.saved_tensors
        groups, scaling = query.shape[0] // key.shape[0], ctx.scaling
        grad = grad.transpose(0, 1)
        delta = (grad.float() * out.float()).sum(-1)
        d_query, d_own_key, d_own_value = map(torch.empty_like, (query, own_key, own_value))
        d_key, d_value = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
        for block in _blocks(rows, ctx.lengths, own_key.shape[0], ctx.window):
            at, keys = block.queries, block.keys
            q, do = _grouped(query[:, at], groups), _grouped(grad[:, at], groups)
            part, d = _grouped(lse[:, at], groups)[..., None], _grouped(delta[:, at], groups)[..., None]
            prefix, own = _scores(q, key[:, keys], own_key[:, :, at], block, scaling, ctx.window)
            p = (prefix - part).exp()
            flat_do, flat_p = do.flatten(1, 2), p.flatten(1, 2).to(do.dtype)
            d_value[:, keys] += flat_p.transpose(1, 2) @ flat_do
            ds = (p * (_weighted(do, value[:, keys].transpose(1, 2)).float() - d) * scaling).to(q.dtype)
            d_key[:, keys] += ds.flatten(1, 2).transpose(1, 2) @ q.flatten(1, 2)
            dq = _weighted(ds, key[:, keys])
            if own.shape[-1]:
                p_own = (own - part).exp()
                dp_own = torch.einsum("hgbd,khbd->hgbk", do, own_value[:, :, at]).float()
                ds_own = (p_own * (dp_own - d) * scaling).to(q.dtype)
                d_own_value[:, :, at] = torch.einsum("hgbk,hgbd->khbd", p_own.to(do.dtype), do)
                d_own_key[:, :, at] = torch.einsum("hgbk,hgbd->khbd", ds_own, q)
                dq = dq + torch.einsum("hgbk,khbd->hgbd", ds_own, own_key[:, :, at])
            d_query[:, at] = dq.flatten(0, 1)
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), d_own_key, d_own_value, None, None, None, None


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[Hq, ...] -> [Hkv, G, ...]"""
    return x.unflatten(0, (-1, groups))


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """[Hkv, G, b, m] x [Hkv, m, d] -> [Hkv, G, b, d]: one product per KV head, its group's rows stacked."""
    return (weights.flatten(1, 2) @ values).unflatten(1, weights.shape[1:3])


def _scores(q: Tensor, key: Tensor, own_key: Tensor, block: _Block, scaling: float, window: int | None):
    """Scores in fp32 of a block: prefix [Hkv, G, b, m] and own [Hkv, G, b, k], -inf where not visible."""
    prefix = _weighted(q, key.transpose(1, 2)).float() * scaling
    own = torch.einsum("hgbd,khbd->hgbk", q, own_key).float() * scaling
    if window is not None and own.shape[-1] > window:
        own[..., : own.shape[-1] - window] = float("-inf")
    return prefix.masked_fill(block.hidden, float("-inf")), own


def _blocks(rows: Tensor, lengths: list[int], steps: int, window: int | None) -> Iterator[_Block]:
    """Blocks of at most BLOCK queries, none across documents, each with the keys that it can see."""
    ends = torch.tensor(lengths).cumsum(0)
    firsts = [0, *torch.searchsorted(rows.cpu(), ends).tolist()]
    starts = [0, *ends.tolist()]
    for document in range(len(lengths)):
        for first in range(firsts[document], firsts[document + 1], BLOCK):
            queries = slice(first, min(first + BLOCK, firsts[document + 1]))
            at = rows[queries]
            keys = slice(starts[document], int(at[-1]) + 1)
            place = torch.arange(keys.start, keys.stop, device=rows.device)
            hidden = place > at[:, None]
            if window is not None:
                hidden = hidden | (at[:, None] + steps - place >= window)
            yield _Block(queries, keys, hidden)
