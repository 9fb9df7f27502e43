"""What each query row of a forward may see, made once and used by every layer."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from eagle3_kernels.bits import unpack_bits
from eagle3_kernels.paging import Run, page_runs


@dataclass
class TreeView:
    """B slots, each with `lens` committed rows and A fresh rows after them; the last N fresh rows are the queries.

    Verification has N = A; a drafted frontier has N < A; a causal view (mask None) is a prompt or a chain, whose
    positions are 0 .. A-1. Only what the reference asks for is copied to the host, when it asks.

    Args:
        page_table: pages of each slot [B, P] int32.
        lens: committed rows [B] int32: positions 0 .. lens-1.
        positions: levels of the fresh rows [B, A] int32, relative to lens.
        mask: fresh rows that each query sees, packed int32 [B, N, ceil(A / 32)]; None = row i sees 0 .. i.
        queries: N.
    """

    page_table: Tensor
    lens: Tensor
    positions: Tensor
    mask: Tensor | None
    queries: int
    _biases: dict = field(init=False, default_factory=dict)

    @cached_property
    def _runs(self) -> list[list[Run]]:
        return [page_runs(pages) for pages in self.page_table.tolist()]

    @cached_property
    def _lens(self) -> list[int]:
        return self.lens.tolist()

    @cached_property
    def levels(self) -> Tensor:
        """`positions` as kernels read them: contiguous int32 [B, A]."""
        return self.positions.int().contiguous()

    @property
    def fresh(self) -> int:
        return self.positions.shape[1]

    def runs(self, slot: int) -> list[Run]:
        """The slot's pages, and perhaps more after them."""
        return self._runs[slot]

    def length(self, slot: int) -> int:
        """K/V rows of a slot, fresh ones included."""
        return self._lens[slot] + self.fresh

    def square_causal(self, slot: int, window: int | None) -> bool:
        """Whether a slot's queries are a whole causal document without an effective window."""
        whole = self.mask is None and self._lens[slot] == 0 and self.queries == self.fresh
        return whole and self._window(slot, window) is None

    def bias(self, slot: int, window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        """0 where a query sees a key and -inf elsewhere [groups * N, L]; None where all is seen."""
        key = (slot, self._window(slot, window), groups, dtype)
        if key not in self._biases:
            self._biases[key] = self._make_bias(*key)
        return self._biases[key]

    def _window(self, slot: int, window: int | None) -> int | None:
        # positions never exceed row counts, so a window of the whole slot hides nothing
        return window if window is not None and window < self.length(slot) else None

    def _make_bias(self, slot: int, window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        n, fresh, length = self.queries, self.fresh, self._lens[slot]
        if n == 1 and self.mask is None and window is None:
            return None
        device = self.positions.device
        visible = torch.ones(n, length + fresh, dtype=torch.bool, device=device)
        if self.mask is None:
            visible[:, length:].tril_(fresh - n)
        else:
            visible[:, length:] = unpack_bits(self.mask[slot], fresh)
        if window is not None:
            visible &= self._distances(slot) < window
        bias = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
        return bias.repeat(groups, 1) if groups > 1 else bias

    def _distances(self, slot: int) -> Tensor:
        """Position of each query minus position of each key [N, L]."""
        fresh = self._lens[slot] + self.positions[slot]
        keys = torch.cat([torch.arange(self._lens[slot], dtype=fresh.dtype, device=fresh.device), fresh])
        return fresh[-self.queries :, None] - keys
