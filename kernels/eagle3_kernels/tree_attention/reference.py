"""The definition of tree_attention. A slot's consecutive pages are a view, never gathered."""

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_kernels.paging import slot_rows
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
        length = view.length(slot)
        key, value = (slot_rows(pool, view.pages(slot), length).transpose(0, 1) for pool in (keys, values))
        outputs.append(_attend(query[slot].transpose(0, 1), key, value, view, slot, scaling, window, softcap, sinks))
    return outputs[0][None] if len(outputs) == 1 else torch.stack(outputs)


def _attend(query, key, value, view: TreeView, slot: int, scaling, window, softcap, sinks) -> Tensor:
    """query [Hq, N, d], key [Hkv, L, d], value [Hkv, L, dv] -> [N, Hq, dv]."""
    heads, n, _ = query.shape
    groups = heads // key.shape[0]
    # a group's heads are rows over the same keys, so keys are never repeated
    folded = query.reshape(key.shape[0], groups * n, -1)
    if softcap is not None or sinks is not None:
        sinks = None if sinks is None else sinks.float().view(-1, groups, 1).repeat_interleave(n, 1)
        out = formula_attention(
            folded, key, value, view.bias(slot, window, groups, query.dtype), scaling, softcap, sinks
        )
    elif n <= MOST_FOLDED_ROWS:
        bias = view.bias(slot, window, groups, query.dtype)
        out = F.scaled_dot_product_attention(folded[None], key[None], value[None], attn_mask=bias, scale=scaling)
    else:
        causal = view.square_causal(slot, window)
        bias = None if causal else view.bias(slot, window, 1, query.dtype)
        grouped = (x[:, None].expand(-1, groups, -1, -1) for x in (key, value))
        out = F.scaled_dot_product_attention(
            folded.unflatten(1, (groups, n)), *grouped, attn_mask=bias, is_causal=causal, scale=scaling
        )
    return out.reshape(heads, n, -1).transpose(0, 1).contiguous()


def formula_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention by its formula, softmax in fp32: what transformers' "eager" computes, in its order.

    Args:
        query: [h, M, d], each of the h heads over keys and values of its own.
        key, value: [h, L, d] and [h, L, dv].
        bias: 0 where a row sees a key and -inf elsewhere [M, L]; None = all is seen.
        sinks: fp32 [h, M, 1].
    Returns:
        [h, M, dv].
    """
    scores = (query @ key.transpose(1, 2)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float() if bias is None else scores.float() + bias
    if sinks is not None:
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(value.dtype) @ value
