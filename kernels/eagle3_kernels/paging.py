"""Where a slot's row lies in a pool of pages."""

from itertools import pairwise

import torch
from torch import Tensor


def physical_rows(pages: Tensor, rows: Tensor, page_size: int) -> Tensor:
    """Pool rows of slot rows: pages [n, P] (each row's own slot), rows [n] -> int64 [n]."""
    page = pages.long().gather(1, (rows // page_size)[:, None]).squeeze(1)
    return page * page_size + rows % page_size


def consecutive(pages: list[int]) -> bool:
    """Whether the pages form one run, so that a slot's rows are a view of the pool."""
    return all(b == a + 1 for a, b in pairwise(pages))


def slot_rows(pool: Tensor, pages: list[int], length: int) -> Tensor:
    """Rows :length of one slot [length, heads, dim] of a pool [pages, page_size, heads, dim].

    A run of pages is a view; scattered pages are gathered.
    """
    page_size = pool.shape[1]
    used = pages[: (length + page_size - 1) // page_size]
    if consecutive(used):
        return pool.flatten(0, 1)[used[0] * page_size :][:length] if used else pool.flatten(0, 1)[:0]
    return pool[torch.tensor(used, device=pool.device)].flatten(0, 1)[:length]
