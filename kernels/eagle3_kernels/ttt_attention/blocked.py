"""TTT attention in memory linear in T: blocks of queries against the keys that they see, scores recomputed backwards.

The softmax over prefix and own keys is the prefix's own softmax P, whose sum's logarithm is lse_p, shrunk by c:
    c = exp(lse_p - lse)     w_i = exp(s_i - lse) of own key i     O = c P V + sum_i w_i V_i     D = sum(dO * O)
    dV = P^T (c dO)          ds = P * (c dO V^T - c D)             dQ = scaling ds K             dK = scaling ds^T Q
    dV_i = w_i dO            ds_i = w_i (dO V_i - D)               dQ += scaling ds_i K_i        dK_i = scaling ds_i Q
with gradients of keys and values summed over the query heads of their group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128


@dataclass(frozen=True)
class _Block:
    """Queries of one document, and the keys that some of them see."""

    queries: slice
    keys: slice
    # the first key, counted from keys.start, that not all of them see; from there on, true where one must not look
    first_hidden: int
    hidden: Tensor


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
        steps, kv_heads = own_key.shape[0], key.shape[0]
        blocks = _blocks(rows, lengths, steps, window)
        # [Hkv, G, R, ...], grouped by the key head that a query head reads
        q = query.unflatten(0, (kv_heads, -1))
        out = query.new_zeros(*q.shape[:3], value.shape[-1])
        lse_p = out.new_full(out.shape[:3], float("-inf"), dtype=_exact(query))
        for block in blocks:
            p, lse_p[:, :, block.queries] = _prefix(q[:, :, block.queries], key, block, scaling)
            out[:, :, block.queries] = _per_query(p.to(value.dtype) @ value[:, block.keys], block)
        lse = lse_p
        if steps:
            own = _own_scores(q, own_key, scaling, window)
            lse = torch.logaddexp(lse_p, own.logsumexp(0))
            out.mul_((lse_p - lse).exp_()[..., None].to(out.dtype))
            for weight, v in zip(own.sub_(lse).exp_().to(value.dtype), own_value, strict=True):
                out.addcmul_(weight[..., None], v[:, None])
        # heads last, as the next layer reads it: kept once for both
        out = out.flatten(0, 1).transpose(0, 1).contiguous()
        ctx.save_for_backward(query, key, value, own_key, own_value, out, lse_p, lse)
        ctx.blocks, ctx.scaling, ctx.window = blocks, scaling, window
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, own_key, own_value, out, lse_p, lse = ctx.saved_tensors
        scaling, exact, kv_heads = ctx.scaling, _exact(query), key.shape[0]
        q, d_out, out = (x.unflatten(0, (kv_heads, -1)) for x in (query, grad.transpose(0, 1), out.transpose(0, 1)))
        delta = (d_out.to(exact) * out).sum(-1, keepdim=True)
        d_query = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        d_own_key, d_own_value = torch.empty_like(own_key), torch.empty_like(own_value)
        if len(own_key):
            weights = _own_scores(q, own_key, scaling, ctx.window).sub_(lse).exp_()
            for i, (k, v) in enumerate(zip(own_key, own_value, strict=True)):
                weight = weights[i, ..., None]
                d_own_value[i] = (weight * d_out).sum(1)
                d_score = weight * ((d_out * v[:, None]).to(exact).sum(-1, keepdim=True) - delta) * scaling
                d_own_key[i] = (d_score * q).sum(1)
                d_query.addcmul_(d_score.to(q.dtype), k[:, None])
            share = (lse_p - lse).exp_()[..., None]
            d_out, delta = (d_out * share).to(d_out.dtype), delta * share
        d_key, d_value = (torch.zeros(x.shape, dtype=exact, device=x.device) for x in (key, value))
        for block in ctx.blocks:
            at, keys = block.queries, block.keys
            p, _ = _prefix(q[:, :, at], key, block, scaling)
            do = d_out[:, :, at].flatten(1, 2)
            _add_product(d_value[:, keys], p.to(do.dtype).transpose(1, 2), do)
            ds = (do @ value[:, keys].transpose(1, 2)).to(exact).sub_(delta[:, :, at].flatten(1, 2)).mul_(p).to(q.dtype)
            _add_product(d_key[:, keys], ds.transpose(1, 2), q[:, :, at].flatten(1, 2), scaling)
            d_query[:, :, at] += _per_query(ds @ key[:, keys], block).mul_(scaling)
        return d_query.flatten(0, 1), d_key.to(key.dtype), d_value.to(value.dtype), d_own_key, d_own_value, *[None] * 4


def _prefix(q: Tensor, key: Tensor, block: _Block, scaling: float) -> tuple[Tensor, Tensor]:
    """Softmax [Hkv, G * b, m] of queries [Hkv, G, b, d] over the block's keys, and its log-sum-exp [Hkv, G, b]."""
    flat, k = q.flatten(1, 2), key[:, block.keys]
    nothing = flat.new_empty(1, 1, 1)
    # with beta 0 the first operand is not read
    scores = torch.baddbmm(nothing, flat, k.transpose(1, 2), beta=0, alpha=scaling).to(_exact(q))
    _per_query(scores, block)[..., block.first_hidden :].masked_fill_(block.hidden, float("-inf"))
    p = scores.softmax(-1)
    # a query sees itself at least, so the largest probability is at least 1 / m
    lse = scores.amax(-1) - p.amax(-1).log_()
    return p, lse.unflatten(1, (-1, block.queries.stop - block.queries.start))


def _own_scores(q: Tensor, own_key: Tensor, scaling: float, window: int | None) -> Tensor:
    """[k, Hkv, G, R]: every query against its own row's key of each step, -inf outside the window."""
    scores = torch.stack([(q * k[:, None]).to(_exact(q)).sum(-1) for k in own_key]).mul_(scaling)
    if window is not None:
        # the last own key is the query's own position
        scores[: max(0, len(own_key) - window)] = float("-inf")
    return scores


def _per_query(x: Tensor, block: _Block) -> Tensor:
    """[Hkv, G * b, n] -> [Hkv, G, b, n]"""
    return x.unflatten(1, (-1, block.queries.stop - block.queries.start))


def _add_product(total: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> None:
    """total += factor a b, summed in total's dtype."""
    if a.dtype == total.dtype:
        total.baddbmm_(a, b, alpha=factor)
    else:
        total.add_(a @ b, alpha=factor)


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _blocks(rows: Tensor, lengths: list[int], steps: int, window: int | None) -> list[_Block]:
    """Blocks of at most BLOCK queries, none across documents; none at all where the window ends before the prefix."""
    if window is not None and steps >= window:
        return []
    at = rows.tolist()
    ends = torch.tensor(lengths).cumsum(0)
    firsts = [0, *torch.searchsorted(rows.cpu(), ends).tolist()]
    starts, blocks = [0, *ends.tolist()], []
    for document in range(len(lengths)):
        for first in range(firsts[document], firsts[document + 1], BLOCK):
            last = min(first + BLOCK, firsts[document + 1])
            start, all_see = starts[document], at[first] + 1
            if window is not None:
                start = max(start, at[first] + steps - window + 1)
                # of the keys from here on each query has its own, the window's edge moves with it
                all_see = start
            place = torch.arange(all_see, at[last - 1] + 1, device=rows.device)
            query = rows[first:last, None]
            hidden = place > query
            if window is not None:
                hidden = hidden | (query + steps - place >= window)
            blocks.append(_Block(slice(first, last), slice(start, at[last - 1] + 1), all_see - start, hidden))
    return blocks
