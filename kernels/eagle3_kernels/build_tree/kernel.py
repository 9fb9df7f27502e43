"""build_tree and link_tree in Triton.

Levels are laid side by side, every candidate counts those before it in the order (-score, level, index), the first
`nodes` become rows, and rows are linked: no sort, no loop on the host but over levels.
"""

# pyright reads a launch as a plain call: constexpr parameters get plain values
# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_kernels.bits import words
from eagle3_kernels.ordering_kernel import ABSENT, rank_of
from eagle3_kernels.structures import Level, Tree
from eagle3_kernels.testing import Case

LAY_BLOCK = 256
ORDER_BLOCK, ORDER_TILE = 32, 128
LINK_BLOCK, LINK_TILE = 32, 64


# sizes differ from level to level and, where trees adapt, from round to round: one compilation for all
@triton.jit(do_not_specialize=["size", "total", "first", "frontier", "first_above", "first_row", "level"])
def lay_level_kernel(
    scores_ptr,  # fp32 [B, size]: a level's candidates
    tokens_ptr,  # integers [B, size]
    edges_ptr,  # fp32 [B, size]
    parents_ptr,  # integers [B, size]: rows of the frontier above
    chosen_ptr,  # integers [B, frontier]: which candidates of the level above form it; None at the first level
    max_level_ptr,  # integers [B], or None
    all_scores_ptr,  # out, fp32 [B, C]
    all_tokens_ptr,  # out, int32 [B, C]
    all_edges_ptr,  # out, fp32 [B, C]
    above_ptr,  # out, int32 [B, C]: the parent among all candidates, -1 = the root
    source_ptr,  # out, int32 [B, C]: the parent among the rows of all frontiers
    size,
    total,  # C
    first,  # candidates before this level
    frontier,
    first_above,  # candidates before the level above
    first_row,  # rows of the frontiers before the one above
    level,
    BLOCK: tl.constexpr,
):
    """Program (slot, block of candidates): copy a level to its place among all, parents counted among all."""
    slot = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    here, there = slot * size + at, slot * total + first + at
    score = tl.load(scores_ptr + here, mask=inside)
    if max_level_ptr is not None:
        score = tl.where(tl.load(max_level_ptr + slot) < level, float("-inf"), score)
    parent = tl.load(parents_ptr + here, mask=inside, other=0)
    if chosen_ptr is not None:
        above = first_above + tl.load(chosen_ptr + slot * frontier + parent, mask=inside, other=0).to(tl.int32)
    else:
        above = tl.full([BLOCK], -1, tl.int32)
    tl.store(all_scores_ptr + there, score, mask=inside)
    tl.store(all_tokens_ptr + there, tl.load(tokens_ptr + here, mask=inside).to(tl.int32), mask=inside)
    tl.store(all_edges_ptr + there, tl.load(edges_ptr + here, mask=inside), mask=inside)
    tl.store(above_ptr + there, above, mask=inside)
    tl.store(source_ptr + there, first_row + parent.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["candidates", "nodes"])
def order_kernel(
    scores_ptr,  # fp32 [B, C]
    flat_ptr,  # out, int32 [B, nodes]: the best candidates in order
    row_of_ptr,  # out, int32 [B, C]: row of the tree, 0 = not among the best
    candidates,  # C
    nodes,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (slot, block of candidates): a candidate's row is how many rank before it, plus the root."""
    slot = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < candidates
    mine = rank_of(tl.load(scores_ptr + slot * candidates + at, mask=inside, other=0.0), at)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, candidates, TILE):
        other = start + tl.arange(0, TILE)
        real = other < candidates
        score = tl.load(scores_ptr + slot * candidates + other, mask=real, other=0.0)
        rank = tl.where(real, rank_of(score, other), ABSENT)
        before += tl.sum((rank[None, :] > mine[:, None]).to(tl.int32), 1)
    chosen = inside & (before < nodes)
    tl.store(row_of_ptr + slot * candidates + at, tl.where(chosen, before + 1, 0), mask=inside)
    tl.store(flat_ptr + slot * nodes + before, at, mask=chosen)


@triton.jit(do_not_specialize=["candidates", "nodes"])
def fill_rows_kernel(
    roots_ptr,  # [B] any dtype
    flat_ptr,  # int32 [B, nodes]
    row_of_ptr,  # int32 [B, C]
    above_ptr,  # int32 [B, C]
    all_scores_ptr,  # fp32 [B, C]
    all_tokens_ptr,  # int32 [B, C]
    all_edges_ptr,  # fp32 [B, C]
    all_source_ptr,  # int32 [B, C]
    limit_ptr,  # integers [B], or None
    count_ptr,  # out, int32 [B]
    tokens_ptr,  # out, int32 [B, nodes + 1]
    parent_ptr,  # out, int32 [B, nodes + 1]
    scores_ptr,  # out, fp32 [B, nodes + 1]
    edges_ptr,  # out, fp32 [B, nodes + 1]
    source_ptr,  # out, int32 [B, nodes + 1]
    candidates,  # C
    nodes,
    ROWS: tl.constexpr,  # nodes + 1 rounded up to a power of two
):
    """Program slot: everything of its rows but the links."""
    slot = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    drawn = (row > 0) & (row <= nodes)
    at = slot * candidates + tl.load(flat_ptr + slot * nodes + row - 1, mask=drawn, other=0)
    score = tl.load(all_scores_ptr + at, mask=drawn, other=float("-inf"))
    kept = score > float("-inf")
    if limit_ptr is not None:
        kept = kept & (row <= tl.load(limit_ptr + slot))
    above = tl.load(above_ptr + at, mask=kept, other=-1)
    parent = tl.load(row_of_ptr + slot * candidates + above, mask=above >= 0, other=0)
    token = tl.load(all_tokens_ptr + at, mask=kept, other=0)
    # NaN stays: a head that is not finite must be seen
    score = tl.where(kept | (score != score), score, float("-inf"))
    root = tl.load(roots_ptr + slot).to(tl.int32)
    out, stored = slot * (nodes + 1) + row, row <= nodes
    tl.store(count_ptr + slot, 1 + tl.sum(kept.to(tl.int32), 0))
    tl.store(tokens_ptr + out, tl.where(row == 0, root, token), mask=stored)
    tl.store(parent_ptr + out, tl.where(kept, parent, -1), mask=stored)
    tl.store(scores_ptr + out, tl.where(row == 0, 0.0, score), mask=stored)
    tl.store(edges_ptr + out, tl.load(all_edges_ptr + at, mask=drawn, other=0.0), mask=stored)
    tl.store(source_ptr + out, tl.load(all_source_ptr + at, mask=kept, other=-1), mask=stored)


@triton.jit(do_not_specialize=["n", "words", "depth"])
def link_rows_kernel(
    parent_ptr,  # int32 [B, N]
    position_ptr,  # out, int32 [B, N]
    mask_ptr,  # out, int32 [B, N, words]
    first_child_ptr,  # out, int32 [B, N]
    next_sibling_ptr,  # out, int32 [B, N]
    n,  # N
    words,
    depth,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,  # words rounded up to a power of two
):
    """Program (slot, block of rows): walk up to the root for mask and position, look at all rows for the links."""
    slot = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.arange(0, WORDS)
    inside = row < n
    node = tl.where(inside, row, -1)
    mask = tl.zeros([BLOCK, WORDS], tl.int32)
    position = tl.full([BLOCK], -1, tl.int32)
    for _ in range(depth + 1):
        there = node >= 0
        here = there[:, None] & ((node >> 5)[:, None] == word[None, :])
        mask |= tl.where(here, (1 << (node & 31))[:, None], 0)
        position += there.to(tl.int32)
        node = tl.load(parent_ptr + slot * n + node, mask=there, other=-1)
    parent = tl.load(parent_ptr + slot * n + row, mask=inside, other=-1)
    child, sibling = tl.full([BLOCK], n, tl.int32), tl.full([BLOCK], n, tl.int32)
    for start in range(0, n, TILE):
        other = start + tl.arange(0, TILE)
        above = tl.load(parent_ptr + slot * n + other, mask=other < n, other=-1)[None, :]
        child = tl.minimum(child, tl.min(tl.where(above == row[:, None], other[None, :], n), 1))
        later = (above == parent[:, None]) & (above >= 0) & (other[None, :] > row[:, None])
        sibling = tl.minimum(sibling, tl.min(tl.where(later, other[None, :], n), 1))
    tl.store(position_ptr + slot * n + row, position, mask=inside)
    tl.store(first_child_ptr + slot * n + row, tl.where(child < n, child, -1), mask=inside)
    tl.store(next_sibling_ptr + slot * n + row, tl.where(sibling < n, sibling, -1), mask=inside)
    stored = inside[:, None] & (word < words)[None, :]
    tl.store(mask_ptr + (slot * n + row)[:, None] * words + word[None, :], mask, mask=stored)


def build_tree(
    roots: Tensor,
    levels: Sequence[Level],
    nodes: int,
    max_level: Tensor | None = None,
    limit: Tensor | None = None,
) -> Tree:
    """The reference's tree in len(levels) + 3 launches, without a host sync.

    Reads each level's fields once and C scores per ORDER_BLOCK candidates; writes 20 bytes per candidate and the tree.
    """
    slots, device = len(roots), roots.device
    candidates = sum(level.tokens.shape[1] for level in levels)
    nodes = min(nodes, candidates)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    laid = _lay_levels(levels, candidates, max_level, empty)
    all_scores, all_tokens, all_edges, above, all_source = laid
    flat, row_of = empty(slots, nodes), empty(slots, candidates)
    order_kernel[slots, triton.cdiv(candidates, ORDER_BLOCK)](
        all_scores, flat, row_of, candidates, nodes, BLOCK=ORDER_BLOCK, TILE=ORDER_TILE
    )
    shape = (slots, nodes + 1)
    count, tokens, parent, source = empty(slots), empty(*shape), empty(*shape), empty(*shape)
    scores, edges = empty(*shape, dtype=torch.float32), empty(*shape, dtype=torch.float32)
    fill_rows_kernel[slots,](
        roots.contiguous(),
        flat,
        row_of,
        above,
        all_scores,
        all_tokens,
        all_edges,
        all_source,
        None if limit is None else limit.contiguous(),
        count,
        tokens,
        parent,
        scores,
        edges,
        source,
        candidates,
        nodes,
        ROWS=triton.next_power_of_2(nodes + 1),
    )
    return link_tree(count, tokens, parent, scores, len(levels), edges, source)


def _lay_levels(levels, candidates: int, max_level: Tensor | None, empty) -> tuple[Tensor, ...]:
    """All candidates' scores, tokens, edges, parents among candidates, sources [B, C]."""
    slots = levels[0].tokens.shape[0]
    scores, edges = (empty(slots, candidates, dtype=torch.float32) for _ in range(2))
    tokens, above, source = (empty(slots, candidates) for _ in range(3))
    max_level = None if max_level is None else max_level.contiguous()
    chosen, first, first_above, first_row = None, 0, 0, 0
    for number, level in enumerate(levels, 1):
        size, frontier = level.tokens.shape[1], 0 if chosen is None else chosen.shape[1]
        lay_level_kernel[slots, triton.cdiv(size, LAY_BLOCK)](
            *(field.contiguous() for field in (level.scores, level.tokens, level.edges, level.parents)),
            chosen,
            max_level,
            scores,
            tokens,
            edges,
            above,
            source,
            size,
            candidates,
            first,
            frontier,
            first_above,
            first_row,
            number,
            BLOCK=LAY_BLOCK,
        )
        first_above, first, first_row = first, first + size, first_row + (frontier or 1)
        chosen = level.chosen.contiguous()
    return scores, tokens, edges, above, source


def link_tree(
    count: Tensor,
    tokens: Tensor,
    parent: Tensor,
    scores: Tensor,
    depth: int,
    edges: Tensor | None = None,
    source: Tensor | None = None,
) -> Tree:
    """Positions, ancestor masks and child links in one launch, from the parents [B, N] alone."""
    parent = parent.int().contiguous()
    slots, n = parent.shape
    position, first_child, next_sibling = (torch.empty_like(parent) for _ in range(3))
    mask = parent.new_empty(slots, n, words(n))
    link_rows_kernel[slots, triton.cdiv(n, LINK_BLOCK)](
        parent,
        position,
        mask,
        first_child,
        next_sibling,
        n,
        mask.shape[2],
        depth,
        BLOCK=LINK_BLOCK,
        TILE=LINK_TILE,
        WORDS=triton.next_power_of_2(mask.shape[2]),
    )
    return Tree(
        count=count.int(),
        tokens=tokens.int(),
        parent=parent,
        position=position,
        ancestor_mask=mask,
        first_child=first_child,
        next_sibling=next_sibling,
        scores=scores,
        depth=depth,
        edges=edges,
        source=None if source is None else source.int(),
    )


def _lay_case(first: bool, limited: bool) -> Case:
    reads = {f"{name}_ptr": kind for name, kind in (("scores", "*fp32"), ("tokens", "*i64"), ("edges", "*fp32"))}
    writes = dict.fromkeys(("all_tokens_ptr", "above_ptr", "source_ptr"), "*i32")
    integers = dict.fromkeys(("size", "total", "first", "frontier", "first_above", "first_row", "level"), "i32")
    optional = {"chosen_ptr": None if first else "*i64", "max_level_ptr": "*i64" if limited else None}
    return Case(
        f"lay level {'first' if first else 'next'}{' limited' if limited else ''}",
        lay_level_kernel,
        {
            **reads,
            "parents_ptr": "*i64",
            **{name: kind for name, kind in optional.items() if kind},
            **writes,
            "all_scores_ptr": "*fp32",
            "all_edges_ptr": "*fp32",
            **integers,
        },
        {**{name: None for name, kind in optional.items() if not kind}, "BLOCK": LAY_BLOCK},
        full=first == limited,
    )


def _fill_case(nodes: int, limited: bool) -> Case:
    integers = ("flat", "row_of", "above", "all_tokens", "all_source", "count", "tokens", "parent", "source")
    return Case(
        f"fill rows n{nodes}{' limited' if limited else ''}",
        fill_rows_kernel,
        {
            "roots_ptr": "*i64",
            **{f"{name}_ptr": "*i32" for name in integers},
            **{f"{name}_ptr": "*fp32" for name in ("all_scores", "all_edges", "scores", "edges")},
            **({"limit_ptr": "*i64"} if limited else {}),
            "candidates": "i32",
            "nodes": "i32",
        },
        {**({} if limited else {"limit_ptr": None}), "ROWS": triton.next_power_of_2(nodes + 1)},
        full=not limited,
    )


def _link_case(nodes: int) -> Case:
    pointers = ("parent", "position", "mask", "first_child", "next_sibling")
    return Case(
        f"link rows n{nodes}",
        link_rows_kernel,
        {**{f"{name}_ptr": "*i32" for name in pointers}, "n": "i32", "words": "i32", "depth": "i32"},
        {"BLOCK": LINK_BLOCK, "TILE": LINK_TILE, "WORDS": triton.next_power_of_2(words(nodes + 1))},
    )


COMPILE_CASES = [
    *(_lay_case(first, limited) for first in (True, False) for limited in (True, False)),
    Case(
        "order fp32",
        order_kernel,
        {"scores_ptr": "*fp32", "flat_ptr": "*i32", "row_of_ptr": "*i32", "candidates": "i32", "nodes": "i32"},
        {"BLOCK": ORDER_BLOCK, "TILE": ORDER_TILE},
    ),
    *(_fill_case(nodes, limited) for nodes in (60, 255) for limited in (True, False)),
    *(_link_case(nodes) for nodes in (60, 255)),
]
