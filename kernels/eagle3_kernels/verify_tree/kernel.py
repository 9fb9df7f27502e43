"""verify_tree in Triton: one program per slot walks its tree, so that a round needs no copy to the host."""

# pyright reads a launch as a plain call: constexpr parameters get plain values, num_warps is no parameter
# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_kernels.structures import Tree, Walk
from eagle3_kernels.testing import Case
from eagle3_kernels.verify_tree import sampled_kernel
from eagle3_kernels.verify_tree.rules import REJECTION, TARGET_ONLY, THRESHOLD

# tokens that the sampled walk looks at in a step, and the warps that do it
BLOCK, WARPS = 2048, 8
# fewer than a wavefront's lanes take more registers
LEAST_ROWS = 64
# tokens that one program of the draw looks at in a step, and programs that fill a device
DRAW_BLOCK, PROGRAMS = 1024, 512
_CODES = {TARGET_ONLY: sampled_kernel.TARGET_ONLY, REJECTION: sampled_kernel.REJECTION}
_CODES[THRESHOLD] = sampled_kernel.THRESHOLD


@triton.jit
def walk_matching(tokens, parent, target, walks, N, depth, ROWS: tl.constexpr, LEVELS: tl.constexpr):
    """Walk one slot's tree along the target's tokens; program (slot).

    Pointers: tokens, parent int32 [B, N]; target integer [B, N]; written: walks int32 [B, depth + 3] = path (-1
    padded), accepted, bonus.
    """
    slot = tl.program_id(0)
    rows, levels = tl.arange(0, ROWS), tl.arange(0, LEVELS)
    parent_of = tl.load(parent + slot * N + rows, mask=rows < N, other=-1)
    token = tl.load(tokens + slot * N + rows, mask=parent_of >= 0, other=-1)
    wanted = tl.load(target + slot * N + parent_of, mask=parent_of >= 0, other=-1)
    hit = (parent_of >= 0) & (token == wanted)
    path = tl.where(levels == 0, 0, -1)
    row, accepted = 0, 0
    # a row without a hit has none at the next level either
    for level in range(1, depth + 1):
        found = tl.min(tl.where(hit & (parent_of == row), rows, ROWS), 0)
        row = tl.where(found < ROWS, found, row)
        accepted += (found < ROWS).to(tl.int32)
        path = tl.where((levels == level) & (found < ROWS), found, path)
    walks += slot * (depth + 3)
    tl.store(walks + levels, path, mask=levels <= depth)
    tl.store(walks + depth + 1, accepted)
    tl.store(walks + depth + 2, tl.load(target + slot * N + row).to(tl.int32))


def verify_tree(tree: Tree, target: Tensor) -> Walk:
    """From each root on, the child whose token is target[b, row], until there is none; see the reference.

    Reads tokens, parents and targets [B, N] (the child links say the same as the parents), writes [B, D + 3] int32.
    A row's target of -1 (sample_nodes: not finite) matches no child; where the walk ends on it, the bonus is -1.
    """
    slots, n = tree.tokens.shape
    walks = torch.empty(slots, tree.depth + 3, dtype=torch.int32, device=tree.tokens.device)
    if slots:
        fields = (x.contiguous() for x in (tree.tokens, tree.parent, target))
        walk_matching[(slots,)](*fields, walks, n, tree.depth, **_sizes(tree), num_warps=1)
    return _split(walks)


def verify_sampled(
    tree: Tree,
    p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    rule: str,
    q: Tensor | None = None,
    target_ids: Tensor | None = None,
    threshold: float = 0.0,
    greedy: Tensor | None = None,
) -> Walk:
    """The walk that a rejection rule accepts, its coins and noise made inside; see the reference.

    Reads p [B, N, V] at visited rows only: target_only once, rejection once and once more per rejected child (and q
    each time), threshold at the children; all once more where the walk ends. Writes [B, D + 3] int32, and of each slot
    what the draw starts from.
    """
    slots, n, vocab = p.shape
    p, seeds, positions = p.float().contiguous(), seeds.long().contiguous(), positions.long().contiguous()
    walks, empty = torch.empty(slots, tree.depth + 3, dtype=torch.int32, device=p.device), _Empty(p.device)
    if not slots:
        return _split(walks)
    source, to_draft, q_rows, q_width = None, None, 0, 0
    if rule == REJECTION:
        assert q is not None and target_ids is not None and tree.source is not None
        q, source, to_draft = q.float().contiguous(), tree.source.contiguous(), _inverse(target_ids, vocab)
        q_rows, q_width = q.shape[1:]
    scales, share = empty.floats(slots, 2), empty.floats(slots, n)
    apart, drawn_by = empty.integers(slots, n), empty.integers(slots)
    noise = seeds, positions, None if greedy is None else greedy.contiguous()
    sizes = _sizes(tree, LEAST_ROWS)
    sampled_kernel.walk_sampled[(slots,)](
        tree.tokens.contiguous(),
        tree.parent.contiguous(),
        source,
        p,
        q,
        to_draft,
        seeds,
        positions,
        walks,
        scales,
        apart,
        share,
        drawn_by,
        float(threshold),
        n,
        vocab,
        tree.depth,
        q_rows,
        q_width,
        RULE=_CODES[rule],
        **sizes,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    chunk, parts = _chunks(slots, vocab)
    best = empty.floats(slots, parts), empty.integers(slots, parts), empty.floats(slots, parts)
    rows, numbers = sizes["ROWS"], (n, vocab, tree.depth, chunk, q_rows, q_width)
    sampled_kernel.draw_chunk[(slots, parts)](
        p, q, to_draft, *noise, walks, scales, apart, drawn_by, *best, *numbers, q is not None, rows, DRAW_BLOCK
    )
    sampled_kernel.draw_end[(slots,)](
        *noise, walks, apart, share, *best, n, tree.depth, parts, rows, triton.next_power_of_2(parts), num_warps=1
    )
    return _split(walks)


class _Empty(NamedTuple):
    device: torch.device

    def floats(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def integers(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.device)


def _inverse(target_ids: Tensor, vocab: int) -> Tensor:
    """Draft id of every target id, -1 where there is none, int32 [V]."""
    draft_ids = torch.arange(len(target_ids), dtype=torch.int32, device=target_ids.device)
    return torch.full((vocab,), -1, dtype=torch.int32, device=target_ids.device).index_copy_(0, target_ids, draft_ids)


def _chunks(slots: int, vocab: int) -> tuple[Any, Any]:
    """Length and number of a row's chunks, such that all slots fill a device."""
    blocks = triton.cdiv(vocab, DRAW_BLOCK)
    chunk = triton.cdiv(blocks, max(1, min(blocks, PROGRAMS // slots))) * DRAW_BLOCK
    return chunk, triton.cdiv(vocab, chunk)


def _sizes(tree: Tree, least_rows: int = 1) -> dict[str, Any]:
    rows, levels = map(triton.next_power_of_2, (tree.tokens.shape[1], tree.depth + 1))
    return {"ROWS": max(rows, least_rows), "LEVELS": levels}


def _split(walks: Tensor) -> Walk:
    return Walk(path=walks[:, :-2], accepted=walks[:, -2], bonus=walks[:, -1])


def _match_case(target: str, rows: int) -> Case:
    pointers = {"tokens": "*i32", "parent": "*i32", "target": f"*{target}", "walks": "*i32"}
    sizes = {"ROWS": rows, "LEVELS": 8}
    return Case(
        f"match {target} N{rows}", walk_matching, pointers | {"N": "i32", "depth": "i32"}, sizes, 1, full=rows != 64
    )


_TYPES = dict.fromkeys(("p", "q", "scales", "share_out", "share_in", "values", "masses"), "*fp32")
_TYPES |= {"threshold": "fp32", "seeds": "*i64", "positions": "*i64", "greedy": "*i1"}
_TYPES |= dict.fromkeys(("N", "V", "depth", "q_rows", "q_width", "chunk", "parts"), "i32")


def _sampled_case(name: str, kernel: Any, absent: Sequence[str], warps: int = 4, **sizes: int) -> Case:
    """Arguments that _TYPES does not name are pointers to int32."""
    given = [x for x in kernel.arg_names if x not in absent and x not in sizes]
    return Case(
        f"{name} N{sizes['ROWS']}",
        kernel,
        {x: _TYPES.get(x, "*i32") for x in given},
        dict.fromkeys(absent) | sizes,
        num_warps=warps,
        divisible=[x for x in ("V", "q_width", "chunk") if x in given],
        full=sizes["ROWS"] != 64,
    )


def _sampled_cases(rows: int) -> Iterator[Case]:
    of_draft = ("source", "q", "to_draft")
    for rule, code in _CODES.items():
        absent = () if rule == REJECTION else of_draft
        sizes = {"RULE": code, "ROWS": rows, "LEVELS": 8, "BLOCK": BLOCK}
        yield _sampled_case(rule, sampled_kernel.walk_sampled, absent, WARPS, **sizes)
    sizes = {"ROWS": rows, "BLOCK": DRAW_BLOCK}
    yield _sampled_case("draw p", sampled_kernel.draw_chunk, of_draft[1:], WITH_Q=False, **sizes)
    yield _sampled_case("draw residual", sampled_kernel.draw_chunk, ("greedy",), WITH_Q=True, **sizes)
    yield _sampled_case("draw end", sampled_kernel.draw_end, (), 1, ROWS=rows, PARTS=128)


COMPILE_CASES = [
    *(_match_case(target, rows) for rows in (16, 64, 256) for target in ("i32", "i64")),
    *(case for rows in (64, 128, 256) for case in _sampled_cases(rows)),
]
