"""Top-k with one order on every device: largest first, equal values by lower index."""

import torch
from torch import Tensor


def stable_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last dim of float32 `x` [..., V], with int64 indices.

    A NaN sorts first or last by its sign bit.

    torch.topk promises no order among equal values. Here value and index share one 64-bit key, so no two keys
    are equal and any top-k of them is the same.
    """
    # +0.0 turns -0.0 into 0.0, which compare equal
    bits = (x + 0.0).view(torch.int32)
    # floats order as sign-magnitude, integers as two's complement
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    index = torch.arange(x.shape[-1], device=x.device)
    keys = (ordered.to(torch.int64) << 32) | (0xFFFFFFFF - index)
    chosen = keys.topk(k, dim=-1).indices
    return x.gather(-1, chosen), chosen
