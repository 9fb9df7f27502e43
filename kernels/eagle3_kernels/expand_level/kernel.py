"""expand_level and grow_mask in Triton."""

# pyright reads a launch as a plain call: constexpr parameters get plain values
# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_kernels import ordering_kernel
from eagle3_kernels.bits import words
from eagle3_kernels.ordering_kernel import (
    ABSENT,
    MOST_K,
    index_of,
    keep_best,
    none_kept,
    places,
    rank_of,
    room,
    room_case,
    stable_topk,
)
from eagle3_kernels.structures import Level
from eagle3_kernels.testing import Case

MASK_BLOCK = 128


@triton.jit(do_not_specialize=["candidates", "children"])
def choose_frontier_kernel(
    scores_ptr,  # fp32 [B, M]: path scores of the frontier above
    added_ptr,  # fp32 [B, C]: what the edges add, C = M * children
    total_ptr,  # out, fp32 [B, C]
    parents_ptr,  # out, int64 [B, C]
    chosen_ptr,  # out, int64 [B, K]
    candidates,  # C
    children,
    K: tl.constexpr,  # nodes of the new frontier
    SLOTS: tl.constexpr,  # K rounded up to a power of two
    TILE: tl.constexpr,
):
    """Program slot: path scores and parents of all candidates, and the K best of them in order."""
    slot = tl.program_id(0).to(tl.int64)
    kept = none_kept(K, SLOTS)
    for start in range(0, candidates, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < candidates
        parent = at // children
        score = tl.load(scores_ptr + slot * (candidates // children) + parent, mask=inside, other=0.0)
        total = score + tl.load(added_ptr + slot * candidates + at, mask=inside, other=0.0)
        tl.store(total_ptr + slot * candidates + at, total, mask=inside)
        tl.store(parents_ptr + slot * candidates + at, parent.to(tl.int64), mask=inside)
        kept = keep_best(kept, tl.where(inside, rank_of(total, at), ABSENT))
    chosen = index_of(kept).to(tl.int64)
    tl.store(chosen_ptr + slot * K + places(kept, K, SLOTS), chosen, mask=tl.arange(0, SLOTS) < K)


def expand_level(
    keys: Tensor,
    scores: Tensor,
    k: int,
    edge: Callable[[Tensor], Tensor] | None = None,
    weigh: Callable[[Tensor], Tensor] | None = None,
) -> Level:
    """The reference's level, k <= MOST_K: total[c] = scores[c // children] + weigh(edge(best[c])), chosen = its k best.

    Three launches beside those of `edge` and `weigh`: chunks of the keys [B, M, V] (read once), their merge, and one
    program per slot over its M * children candidates. No host sync.
    """
    assert keys.dtype == scores.dtype == torch.float32 and k <= MOST_K, (keys.dtype, scores.dtype, k)
    slots, rows, size = keys.shape
    children = min(k, size)
    best, token = stable_topk(keys, children)
    edges = best if edge is None else edge(best)
    added = edges if weigh is None else weigh(edges)
    assert added.dtype == torch.float32 and added.shape == best.shape, (added.dtype, added.shape)
    candidates = rows * children
    width = min(k, candidates)
    total = torch.empty(slots, candidates, device=keys.device)
    parents = torch.empty(slots, candidates, dtype=torch.int64, device=keys.device)
    chosen = torch.empty(slots, width, dtype=torch.int64, device=keys.device)
    if chosen.numel():
        choose_frontier_kernel[slots,](
            scores.contiguous(),
            added.contiguous(),
            total,
            parents,
            chosen,
            candidates,
            children,
            **room(candidates, width),
        )
    return Level(token.flatten(1), parents, total, chosen, edges.flatten(1))


# its sizes differ from level to level: one compilation for all
@triton.jit(do_not_specialize=["rows", "width", "above", "old_words", "new_words"])
def grow_mask_kernel(
    mask_ptr,  # int32 [B, above, old_words], or None at the first level
    parents_ptr,  # integers [B, width]
    out_ptr,  # int32 [B, width, new_words]
    rows,  # drafted rows before this level
    width,
    above,
    old_words,
    new_words,
    BLOCK: tl.constexpr,
):
    """Program (slot, block of words): the parent's bits below `rows`, and the node's own."""
    slot = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width * new_words
    node, word = at // new_words, at % new_words
    bit = rows + node - word * 32
    bits = tl.where((bit >= 0) & (bit < 32), 1 << (bit & 31), 0)
    if mask_ptr is not None:
        seen = inside & (word < old_words) & (word * 32 < rows)
        parent = tl.load(parents_ptr + slot * width + node, mask=seen, other=0)
        old = tl.load(mask_ptr + (slot * above + parent) * old_words + word, mask=seen, other=0)
        left = rows - word * 32
        bits |= tl.where(left >= 32, old, old & ((1 << (left & 31)) - 1))
    tl.store(out_ptr + slot * width * new_words + at, bits, mask=inside)


def grow_mask(mask: Tensor | None, parents: Tensor, rows: int) -> Tensor:
    """Mask of a new frontier, word by word: out[b, m] = mask[b, parents[b, m]] | bit(rows + m).

    One launch, where torch takes a dozen to unpack, gather and pack: it runs once per level, on a few hundred words.
    """
    slots, width = parents.shape
    out = torch.empty(slots, width, words(rows + width), dtype=torch.int32, device=parents.device)
    if out.numel():
        mask = None if mask is None else mask.contiguous()
        above, old_words = (0, 0) if mask is None else mask.shape[1:]
        grow_mask_kernel[slots, triton.cdiv(width * out.shape[2], MASK_BLOCK)](
            mask, parents.contiguous(), out, rows, width, above, old_words, out.shape[2], BLOCK=MASK_BLOCK
        )
    return out


def _mask_case(mask: str | None) -> Case:
    integers = dict.fromkeys(("rows", "width", "above", "old_words", "new_words"), "i32")
    return Case(
        f"grow mask {'first' if mask is None else 'next'}",
        grow_mask_kernel,
        {**({"mask_ptr": mask} if mask else {}), "parents_ptr": "*i64", "out_ptr": "*i32", **integers},
        {**({} if mask else {"mask_ptr": None}), "BLOCK": MASK_BLOCK},
    )


_FRONTIER = {
    **{f"{name}_ptr": "*fp32" for name in ("scores", "added", "total")},
    **{f"{name}_ptr": "*i64" for name in ("parents", "chosen")},
    "candidates": "i32",
    "children": "i32",
}
COMPILE_CASES = [
    *ordering_kernel.COMPILE_CASES,
    *(
        room_case("choose frontier fp32", choose_frontier_kernel, _FRONTIER, k * k, k, full=k == 1)
        for k in (1, 10, MOST_K)
    ),
    _mask_case(None),
    _mask_case("*i32"),
]
