"""Where a slot's row lies in a pool of pages."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """Consecutive pages: the rows in them are a view of the pool."""

    first: int
    pages: int


def physical_rows(pages: Tensor, rows: Tensor, page_size: int) -> Tensor:
    """Pool rows of slot rows: pages [n, P] (each row's own slot), rows [n] -> int64 [n]."""
    page = pages.long().gather(1, (rows // page_size)[:, None]).squeeze(1)
    return page * page_size + rows % page_size


def page_runs(pages: Sequence[int]) -> list[Run]:
    """The pages of one slot as runs, in the slot's order."""
    runs: list[Run] = []
    for page in pages:
        if runs and page == runs[-1].first + runs[-1].pages:
            runs[-1] = Run(runs[-1].first, runs[-1].pages + 1)
        else:
            runs.append(Run(page, 1))
    return runs


def row_views(pool: Tensor, runs: Sequence[Run], length: int) -> list[Tensor]:
    """Rows :length of one slot, run by run: views [rows, heads, dim] of a pool [pages, page_size, heads, dim]."""
    return list(_views(pool, runs, length)) or [pool.flatten(0, 1)[:0]]


def _views(pool: Tensor, runs: Sequence[Run], length: int) -> Iterator[Tensor]:
    rows, page_size = pool.flatten(0, 1), pool.shape[1]
    for run in runs:
        if length <= 0:
            return
        taken = min(length, run.pages * page_size)
        yield rows.narrow(0, run.first * page_size, taken)
        length -= taken


def slot_rows(pool: Tensor, runs: Sequence[Run], length: int) -> Tensor:
    """Rows :length of one slot [length, heads, dim]: a view of one run, a copy of several."""
    views = row_views(pool, runs, length)
    return views[0] if len(views) == 1 else torch.cat(views)
