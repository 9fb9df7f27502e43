"""The definition of build_tree: selection, links, positions and packed masks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3_kernels.bits import pack_bits
from eagle3_kernels.ordering import stable_topk
from eagle3_kernels.structures import Level, Tree


def build_tree(roots: Tensor, levels: Sequence[Level], nodes: int, max_level: Tensor | None = None) -> Tree:
    """The best `nodes` of all candidates below each root, as a linked tree.

    Candidates are ordered by (-score, level, index). An edge score is <= 0, so a parent never scores below its
    child and stands earlier at a tie: the selection is closed under parents by construction. A score of -inf
    is no candidate; fewer candidates than `nodes` give a smaller tree.

    Args:
        roots: target ids [B].
        levels: drafted levels, their tokens as target ids.
        nodes: draft nodes wanted (root excluded).
        max_level: deepest level allowed per slot [B]; None = all.
    """
    tokens, parents, scores = _concatenate(levels, max_level)
    best, flat = stable_topk(scores, min(nodes, scores.shape[1]))
    kept = best > -torch.inf
    row = torch.arange(1, flat.shape[1] + 1, device=flat.device).expand_as(flat)
    row_of = torch.zeros_like(parents).scatter_(1, flat, row)
    # candidate -1 is the root, row 0
    above = parents.gather(1, flat)
    parent = torch.where(above < 0, 0, row_of.gather(1, above.clamp(min=0)))
    return link_tree(
        count=1 + kept.sum(1),
        tokens=_under_root(roots, tokens.gather(1, flat).where(kept, 0)),
        parent=_under_root(-torch.ones_like(roots), parent.where(kept, -1)),
        scores=_under_root(torch.zeros_like(scores[:, 0]), best),
        depth=len(levels),
    )


def _concatenate(levels: Sequence[Level], max_level: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents as flat candidate indices (-1 = root), and scores of all levels, [B, C] each."""
    parents, scores, offset = [], [], 0
    for depth, level in enumerate(levels, start=1):
        if depth == 1:
            parents.append(torch.full_like(level.parents, -1))
        else:
            above = levels[depth - 2]
            parents.append(above.chosen.gather(1, level.parents) + offset)
            offset += above.tokens.shape[1]
        too_deep = None if max_level is None else (max_level < depth)[:, None]
        scores.append(level.scores if too_deep is None else level.scores.masked_fill(too_deep, -torch.inf))
    return torch.cat([level.tokens for level in levels], 1), torch.cat(parents, 1), torch.cat(scores, 1)


def _under_root(root: Tensor, rest: Tensor) -> Tensor:
    return torch.cat([root.to(rest.dtype)[:, None], rest], 1)


def link_tree(count: Tensor, tokens: Tensor, parent: Tensor, scores: Tensor, depth: int) -> Tree:
    """Positions, ancestor masks and child links of trees given by their parents [B, N] (-1 root and unused)."""
    parent = parent.long()
    rows = torch.arange(parent.shape[1], device=parent.device)
    on_path = _root_paths(parent, depth)
    # pairs [B, i, j]
    child = parent[:, None, :] == rows[:, None]
    sibling = (parent[:, :, None] == parent[:, None, :]) & (parent >= 0)[..., None] & (rows > rows[:, None])
    return Tree(
        count=count.int(),
        tokens=tokens.int(),
        parent=parent.int(),
        position=(on_path.sum(-1) - 1).int(),
        ancestor_mask=pack_bits(on_path),
        first_child=_lowest(child),
        next_sibling=_lowest(sibling),
        scores=scores,
        depth=depth,
    )


def _root_paths(parent: Tensor, depth: int) -> Tensor:
    """Bool [B, N, N]: row j lies on the path from the root to row i."""
    slots, n = parent.shape
    # one spare row and column catch the -1 above the root
    above = torch.nn.functional.pad(parent.where(parent >= 0, n), (0, 1), value=n)
    node = torch.arange(n, device=parent.device).expand(slots, n)
    on_path = torch.zeros(slots, n, n + 1, dtype=torch.bool, device=parent.device)
    for _ in range(depth + 1):
        on_path.scatter_(2, node.unsqueeze(-1), True)
        node = above.gather(1, node)
    return on_path[..., :n]


def _lowest(flags: Tensor) -> Tensor:
    """Index of the first True of the last dim, -1 where there is none."""
    n = flags.shape[-1]
    first = torch.arange(n, device=flags.device).where(flags, n).amin(-1)
    return first.where(first < n, -1).int()
