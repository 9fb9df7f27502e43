"""Top-k with one order on every device: largest first, equal values by lower index."""

import torch
from torch import Tensor


def stable_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last dim of `x` [..., V], with int64 indices. A NaN sorts first, whatever its sign.

    torch.topk promises no order among equal values, nor which of them it takes. Both are decided here, the second
    only where the k-th value has equals beyond it.
    """
    size = x.shape[-1]
    best, index = x.topk(min(k + 1, size))
    if k < size:
        beyond, best, index = best[..., k:], best[..., :k], index[..., :k]
        if _same(best[..., -1:], beyond).any():
            index = _lowest_at_the_edge(x, best, index)
    index = index.sort(-1).values
    best, order = x.gather(-1, index).sort(dim=-1, descending=True, stable=True)
    return best, index.gather(-1, order)


def _lowest_at_the_edge(x: Tensor, best: Tensor, index: Tensor) -> Tensor:
    """`index` with the lowest indices of those that equal the smallest of `best`."""
    edge, size, k = best[..., -1:], x.shape[-1], best.shape[-1]
    places = torch.arange(size, dtype=torch.int32, device=x.device).where(_same(x, edge), size)
    lowest = places.topk(k, largest=False).values.long()
    taken = _same(best, edge)
    return lowest.gather(-1, (taken.cumsum(-1) - 1).clamp(min=0)).where(taken, index)


def _same(x: Tensor, y: Tensor) -> Tensor:
    """Whether they tie: a NaN is any other's equal."""
    return (x == y) | (x.isnan() & y.isnan())
