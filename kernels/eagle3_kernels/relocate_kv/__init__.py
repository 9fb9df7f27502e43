"""Move the K/V rows of an accepted path to the end of the committed ones."""

from collections.abc import Sequence

from torch import Tensor

from eagle3_kernels.dispatch import uses_triton
from eagle3_kernels.relocate_kv import reference

__all__ = ["relocate_kv"]


def relocate_kv(pools: Sequence[Tensor], page_table: Tensor, lens: Tensor, path: Tensor) -> None:
    """Move row lens + path[i] to lens + i in every layer of every pool, in place; sources and destinations may overlap.

    Args:
        pools: keys and values of like layers [layers, pages, page_size, heads, dim]; layers, heads, dims may differ.
        page_table: pages of each slot [B, P].
        lens: committed rows of each slot [B]; its tree rows follow them.
        path: accepted tree rows [B, D + 1], -1 padded; ascending, as parents come before children.
    """
    if uses_triton(path):
        from eagle3_kernels.relocate_kv import kernel

        kernel.relocate_kv(pools, page_table, lens, path)
    else:
        reference.relocate_kv(pools, page_table, lens, path)
