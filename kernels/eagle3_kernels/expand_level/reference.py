"""The definition of expand_level. Knows scores and masks, nothing of models."""

from collections.abc import Callable

import torch
from torch import Tensor

from eagle3_kernels.bits import pack_bits, unpack_bits, words
from eagle3_kernels.ordering import stable_topk
from eagle3_kernels.structures import Level


def expand_level(
    keys: Tensor,
    scores: Tensor,
    k: int,
    edge: Callable[[Tensor], Tensor] | None = None,
    weigh: Callable[[Tensor], Tensor] | None = None,
) -> Level:
    """Give each frontier node its k best children, then keep the k best of them all to be expanded next.

    All M * k children stay candidates: the final tree chooses among every level's (EAGLE-2, section 4.2).

    Args:
        keys: what ranks a node's children [B, M, V], float32.
        scores: path scores of the frontier [B, M], float32; -inf marks padding, whose children are -inf too.
        k: children per node and nodes per level; clamped to what exists.
        edge: keys of the children [B, M, k] -> edge scores, log of each child's estimated acceptance, <= 0;
            None = the keys are edge scores (draft log-probabilities).
        weigh: edge scores [B, M, k] -> what they add to path scores, <= 0; None = themselves.
    Returns:
        A level whose tokens index V; equal scores keep the lower flat index.
    """
    children = min(k, keys.shape[-1])
    best, token = stable_topk(keys, children)
    edges = best if edge is None else edge(best)
    total = (scores.unsqueeze(-1) + (edges if weigh is None else weigh(edges))).flatten(1)
    _, chosen = stable_topk(total, min(k, total.shape[1]))
    parents = torch.arange(total.shape[1], device=total.device) // children
    return Level(token.flatten(1), parents.expand_as(total), total, chosen, edges.flatten(1))


def grow_mask(mask: Tensor | None, parents: Tensor, rows: int) -> Tensor:
    """Mask of a new frontier over the drafted rows: each node sees its parent's ancestors and itself.

    Args:
        mask: the frontier above [B, M', W'] over `rows` rows, or None at the first level.
        parents: frontier rows of the parents [B, M].
        rows: drafted rows before this level; the new nodes take rows, rows + 1, ...
    Returns:
        int32 [B, M, ceil((rows + M) / 32)].
    """
    slots, width = parents.shape
    visible = parents.new_zeros(slots, width, words(rows + width) * 32).bool()
    if mask is not None:
        above = unpack_bits(mask, rows)
        visible[..., :rows] = above.gather(1, parents.unsqueeze(-1).expand(-1, -1, rows))
    visible[..., rows : rows + width].diagonal(dim1=1, dim2=2).fill_(True)
    return pack_bits(visible)
