"""Paged K/V pools and the attention context over them. Knows rows and pages, nothing of tokens.

A slot's pages need not be neighbours; a run of neighbours is read as a view, and is given where there is one.
A pool serves one model; its layers may differ in heads and widths. Layers of one shape share a tensor
[layers, pages, page_size, heads, dim], so that an accepted path moves in one operation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.attention import AttentionCall, AttentionContext
from eagle3_kernels.paging import Run, page_runs, physical_rows, slot_rows
from eagle3_kernels.tree_attention import TreeView, tree_attention


class KVShape(NamedTuple):
    """One layer's heads and widths; keys and values may differ (MLA)."""

    heads: int
    key_dim: int
    value_dim: int


class PoolLayout(NamedTuple):
    """What a pool must hold: a shape per layer, and their dtype."""

    shapes: list[KVShape]
    dtype: torch.dtype


class ShapeProbe:
    """An attention context that notes what each layer brings and gives zeros."""

    def __init__(self):
        self.shapes: dict[int, KVShape] = {}
        self.dtype = torch.float32

    def attend(self, call: AttentionCall) -> Tensor:
        self.shapes[call.layer] = KVShape(call.key.shape[0], call.key.shape[-1], call.value.shape[-1])
        self.dtype = call.key.dtype
        heads, rows, _ = call.query.shape
        return call.value.new_zeros(rows, heads, call.value.shape[-1])


def probe_shapes(forward: Callable[[AttentionContext], object]) -> PoolLayout:
    """K/V shapes of every layer, and their dtype, as one forward shows them."""
    probe = ShapeProbe()
    forward(probe)
    return PoolLayout([probe.shapes[layer] for layer in sorted(probe.shapes)], probe.dtype)


class KVPool:
    """Keys and values of every layer for a number of slots.

    Args:
        shapes: one per layer.
        slots: rows of the page table.
        pages, page_size: capacity, shared by all slots.
        spare: further pages, which belong to one more slot that no request gets.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        slots: int,
        pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        spare: int = 0,
    ):
        self.slots, self.pages, self.page_size, self.device = slots, pages, page_size, device
        self.table = torch.zeros(slots + bool(spare), max(pages, spare), dtype=torch.int32, device=device)
        if spare:
            self.table[self.spare_slot, :spare] = torch.arange(pages, pages + spare)
        self._owned: list[list[int]] = [[] for _ in range(slots)]
        self.tensors: list[Tensor] = []
        # per layer: pages of keys and of values, and the same as flat rows
        self._paged: list[tuple[Tensor, Tensor]] = [None] * len(shapes)  # type: ignore[list-item]
        for shape in dict.fromkeys(shapes):
            layers = [i for i, s in enumerate(shapes) if s == shape]
            keys, values = (
                torch.zeros(len(layers), pages + spare, page_size, shape.heads, dim, dtype=dtype, device=device)
                for dim in (shape.key_dim, shape.value_dim)
            )
            self.tensors += [keys, values]
            for i, layer in enumerate(layers):
                self._paged[layer] = (keys[i], values[i])
        self._rows = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self._paged]

    @property
    def layers(self) -> int:
        return len(self._paged)

    @property
    def spare_slot(self) -> int:
        """The slot that no request gets, where there are spare pages."""
        return self.slots

    def pages_for(self, rows: int) -> int:
        return -(-rows // self.page_size)

    def assign(self, slot: int, rows: int) -> bool:
        """Give `slot` pages for `rows` rows, in as few runs as the free ones allow; False if too few are free now."""
        wanted, taken = self.pages_for(rows), {page for pages in self._owned for page in pages}
        free = [page for page in range(self.pages) if page not in taken]
        if len(free) < wanted:
            return False
        pages = _fewest_runs(page_runs(free), wanted)
        self._owned[slot] = pages
        self.table[slot, :wanted] = torch.tensor(pages, dtype=torch.int32)
        return True

    def release(self, slot: int) -> None:
        self._owned[slot] = []
        self.table[slot] = 0

    @property
    def free(self) -> bool:
        """Whether no slot holds pages."""
        return not any(self._owned)

    def paged(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer [pages, page_size, heads, dim]."""
        return self._paged[layer]

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key [Hkv, T, d] and value [Hkv, T, dv] at pool rows [T]."""
        keys, values = self._rows[layer]
        keys.index_copy_(0, rows, key.transpose(0, 1))
        values.index_copy_(0, rows, value.transpose(0, 1))

    def rows(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` rows of a slot's keys and values [length, heads, dim]; scattered ones are copied."""
        runs = page_runs(self._owned[slot])
        keys, values = (slot_rows(pool, runs, length) for pool in self._paged[layer])
        return keys, values

    def view(
        self,
        slots: Sequence[int],
        lens: Sequence[int],
        positions: Tensor,
        mask: Tensor | None = None,
        queries: int | None = None,
    ) -> TreeView:
        """What queries of these slots see: see TreeView."""
        used = self.pages_for(max(lens) + positions.shape[1])
        return TreeView(
            page_table=self.table[list(slots), :used],
            lens=torch.tensor(lens, dtype=torch.int32, device=self.device),
            positions=positions.int(),
            mask=mask,
            queries=positions.shape[1] if queries is None else queries,
        )


def _fewest_runs(free: list[Run], wanted: int) -> list[int]:
    """Pages in ascending order: of the shortest run that holds what is left, else of the longest."""
    pages: list[int] = []
    while wanted > 0:
        fitting = [run for run in free if run.pages >= wanted]
        run = min(fitting, key=_length) if fitting else max(free, key=_length)
        free.remove(run)
        pages += range(run.first, run.first + min(run.pages, wanted))
        wanted -= run.pages
    return sorted(pages)


def _length(run: Run) -> int:
    return run.pages


@dataclass(frozen=True)
class Block:
    """Slots with like rows inside one packed forward, which writes the last `written` of each view's fresh rows."""

    view: TreeView
    written: int

    @property
    def slots(self) -> int:
        return self.view.lens.shape[0]

    def rows(self, page_size: int) -> Tensor:
        """Pool rows of the tokens that the forward brings, in packed order."""
        first = self.view.lens.long() + self.view.fresh - self.written
        rows = first[:, None] + torch.arange(self.written, device=first.device)
        pages = self.view.page_table.repeat_interleave(self.written, 0)
        return physical_rows(pages, rows.flatten(), page_size)


class PagedContext:
    """Attention of one packed forward: its blocks' K/V rows are written to the pool, then read with the rest."""

    def __init__(self, pool: KVPool, blocks: Sequence[Block]):
        self.pool, self.blocks = pool, blocks
        self._rows = torch.cat([block.rows(pool.page_size) for block in blocks])
        self._asked = sum(block.slots * block.view.queries for block in blocks)
        self._all: list[TreeView] | None = None
        self._seen: set[int] = set()

    def attend(self, call: AttentionCall) -> Tensor:
        if call.layer in self._seen:
            raise RuntimeError(f"layer {call.layer} attends twice in one forward")
        self._seen.add(call.layer)
        self.pool.write(call.layer, self._rows, call.key, call.value)
        keys, values = self.pool.paged(call.layer)
        query, start, outputs = call.query.transpose(0, 1), 0, []
        for view, slots in self._views(call.query_rows):
            rows = query[start : start + slots * view.queries].unflatten(0, (slots, view.queries))
            out = tree_attention(rows, keys, values, view, call.scaling, call.window, call.softcap, call.sinks)
            outputs.append(out.flatten(0, 1))
            start += slots * view.queries
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def check_complete(self) -> None:
        """Raise where a layer did not attend here in the forward that is done: its output would be silently wrong.

        Raises:
            RuntimeError: names the layers.
        """
        absent = sorted(set(range(self.pool.layers)) - self._seen)
        if absent:
            raise RuntimeError(
                f"attention layers {absent} of {self.pool.layers} did not come to the engine: was the model changed "
                "since it was loaded (set_attn_implementation, exchanged layers), or is Target.stock() open? Load the "
                "target again, or leave stock() first"
            )

    def _views(self, query_rows: Tensor | None) -> list[tuple[TreeView, int]]:
        """Views whose queries are the rows that came: those that the blocks ask for, or every row that was written."""
        if query_rows is not None:
            if len(query_rows) != self._asked:
                raise RuntimeError(f"{len(query_rows)} query rows came, the blocks ask for {self._asked}")
            views = [block.view for block in self.blocks]
        else:
            # a head of several layers asks for its last rows in the last layer only
            if self._all is None:
                self._all = [_every_row(block) for block in self.blocks]
            views = self._all
        return [(view, block.slots) for view, block in zip(views, self.blocks, strict=True)]


def _every_row(block: Block) -> TreeView:
    view = block.view
    if view.queries == block.written:
        return view
    if view.mask is not None or block.written != view.fresh:
        raise RuntimeError("only causal rows can be asked for in part")
    return TreeView(view.page_table, view.lens, view.positions, None, view.fresh)
