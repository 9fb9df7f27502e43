"""The definition of tree_attention. A slot's pages are runs, each run a view: K/V are never gathered."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_kernels.paging import row_views
from eagle3_kernels.tree_attention.view import TreeView

# prompts have more rows: a mask repeated for each head of a group would cost more than it saves
MOST_FOLDED_ROWS = 128


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    view: TreeView,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from tree rows to their slot's committed rows and their own ancestors.

    Args:
        query: [B, N, Hq, d].
        keys, values: pools [pages, page_size, Hkv, d] and [pages, page_size, Hkv, dv], fresh rows already written.
        window: a query at position p sees positions > p - window (positions, never rows).
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: per-head logits [Hq] that take softmax mass and give nothing.
    Returns:
        [B, N, Hq, dv] contiguous.
    """
    outputs = []
    for slot in range(query.shape[0]):
        runs, length = view.runs(slot), view.length(slot)
        key, value = ([rows.transpose(0, 1) for rows in row_views(pool, runs, length)] for pool in (keys, values))
        outputs.append(_attend(query[slot].transpose(0, 1), key, value, view, slot, scaling, window, softcap, sinks))
    return outputs[0][None] if len(outputs) == 1 else torch.stack(outputs)


def _attend(query, keys, values, view: TreeView, slot: int, scaling, window, softcap, sinks) -> Tensor:
    """query [Hq, N, d], keys and values lists of runs [Hkv, l, d] and [Hkv, l, dv] -> [N, Hq, dv]."""
    heads, n, _ = query.shape
    kv_heads = keys[0].shape[0]
    groups = heads // kv_heads
    # a group's heads are rows over the same keys, so keys are never repeated
    folded = query.reshape(kv_heads, groups * n, -1)
    if len(keys) > 1 or softcap is not None or sinks is not None:
        bias = view.bias(slot, window, groups, query.dtype)
        sinks = None if sinks is None else sinks.float().view(-1, groups, 1).repeat_interleave(n, 1)
        out = formula_attention(folded, keys, values, bias, scaling, softcap, sinks)
    elif n <= MOST_FOLDED_ROWS:
        bias = view.bias(slot, window, groups, query.dtype)
        key, value = keys[0][None], values[0][None]
        out = F.scaled_dot_product_attention(folded[None], key, value, attn_mask=bias, scale=scaling)
    else:
        causal = view.square_causal(slot, window)
        bias = None if causal else view.bias(slot, window, 1, query.dtype)
        grouped = (x[:, None].expand(-1, groups, -1, -1) for x in (keys[0], values[0]))
        out = F.scaled_dot_product_attention(
            folded.unflatten(1, (groups, n)), *grouped, attn_mask=bias, is_causal=causal, scale=scaling
        )
    return out.reshape(heads, n, -1).transpose(0, 1).contiguous()


def formula_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    bias: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention by its formula, softmax in fp32: what transformers' "eager" computes, in its order.

    Args:
        query: [h, M, d], each of the h heads over keys and values of its own.
        keys, values: one or more runs of rows [h, l, d] and [h, l, dv], L rows in all; only scores are joined.
        bias: 0 where a row sees a key and -inf elsewhere [M, L]; None = all is seen.
        sinks: fp32 [h, M, 1].
    Returns:
        [h, M, dv].
    """
    scores = _joined([query @ key.transpose(1, 2) for key in keys]) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float() if bias is None else scores.float() + bias
    if sinks is not None:
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return _weighted_sum(weights.to(values[0].dtype), values)


def _joined(scores: list[Tensor]) -> Tensor:
    return scores[0] if len(scores) == 1 else torch.cat(scores, -1)


def _weighted_sum(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    if len(values) == 1:
        return weights @ values[0]
    parts = weights.split([value.shape[1] for value in values], -1)
    # added up in fp32: a rounding per run would be worse than that of one product
    total = (parts[0] @ values[0]).float()
    for part, value in zip(parts[1:], values[1:], strict=True):
        total += part @ value
    return total.to(weights.dtype)
