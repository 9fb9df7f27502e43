"""The definition of relocate_kv."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3_kernels.paging import physical_rows


def relocate_kv(pools: Sequence[Tensor], page_table: Tensor, lens: Tensor, path: Tensor) -> None:
    """Move row lens + path[i] to lens + i in every layer of every pool, in place.

    All rows are read before any is written, so sources and destinations may overlap.

    Args:
        pools: keys and values of like layers [layers, pages, page_size, heads, dim]; layers, heads, dims may differ.
        page_table: pages of each slot [B, P].
        lens: committed rows of each slot [B]; its tree rows follow them.
        path: accepted tree rows [B, D + 1], -1 padded.
    """
    path = path.long()
    target = torch.arange(path.shape[1], device=path.device).expand_as(path)
    moved = path > target
    pages, page_size = page_table[moved.nonzero()[:, 0]], pools[0].shape[2]
    source, destination = (
        physical_rows(pages, (lens.long()[:, None] + rows)[moved], page_size) for rows in (path, target)
    )
    for pool in pools:
        flat = pool.flatten(1, 2)
        flat[:, destination] = flat[:, source]
