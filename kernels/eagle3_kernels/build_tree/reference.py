"""The definition of build_tree: selection, links, positions and packed masks."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from eagle3_kernels.bits import pack_bits
from eagle3_kernels.ordering import stable_topk
from eagle3_kernels.structures import Level, Tree


def build_tree(
    roots: Tensor,
    levels: Sequence[Level],
    nodes: int,
    max_level: Tensor | None = None,
    limit: Tensor | None = None,
) -> Tree:
    """The best `nodes` of all candidates below each root, as a linked tree.

    Candidates are ordered by (-score, level, index). What an edge adds to a score is <= 0, so a parent never scores
    below its child and stands earlier at a tie: every prefix of that order is closed under parents. A score of -inf
    is no candidate; fewer candidates than `nodes` give a smaller tree.

    Args:
        roots: target ids [B].
        levels: drafted levels, their tokens as target ids.
        nodes: draft nodes wanted (root excluded).
        max_level: deepest level allowed per slot [B]; None = all.
        limit: draft nodes allowed per slot [B], where fewer than `nodes`; None = all.
    """
    tokens, edges = (torch.cat(parts, 1) for parts in zip(*((x.tokens, x.edges) for x in levels), strict=True))
    parents, source = _parents(levels)
    best, flat = stable_topk(_scores(levels, max_level), min(nodes, tokens.shape[1]))
    row = torch.arange(1, flat.shape[1] + 1, device=flat.device).expand_as(flat)
    kept = best > -torch.inf
    if limit is not None:
        kept = kept & (row <= limit[:, None])
    row_of = torch.zeros_like(parents).scatter_(1, flat, row)
    # candidate -1 is the root, row 0
    above = parents.gather(1, flat)
    parent = torch.where(above < 0, 0, row_of.gather(1, above.clamp(min=0)))
    zero, none = torch.zeros_like(roots, dtype=best.dtype), -torch.ones_like(roots)
    return link_tree(
        count=1 + kept.sum(1),
        tokens=_under_root(roots, tokens.gather(1, flat).where(kept, 0)),
        parent=_under_root(none, parent.where(kept, -1)),
        # NaN stays: a head that is not finite must be seen
        scores=_under_root(zero, best.where(kept | best.isnan(), -torch.inf)),
        depth=len(levels),
        edges=_under_root(zero, edges.gather(1, flat)),
        source=_under_root(none, source.gather(1, flat).where(kept, -1)),
    )


def _parents(levels: Sequence[Level]) -> tuple[Tensor, Tensor]:
    """Each candidate's parent as a flat candidate index (-1 = root), and as a row of all frontiers, [B, C] each."""
    parents, source, candidates, rows = [torch.full_like(levels[0].parents, -1)], [levels[0].parents], 0, 1
    for above, level in pairwise(levels):
        parents.append(above.chosen.gather(1, level.parents) + candidates)
        source.append(level.parents + rows)
        candidates += above.tokens.shape[1]
        rows += above.chosen.shape[1]
    return torch.cat(parents, 1), torch.cat(source, 1)


def _scores(levels: Sequence[Level], max_level: Tensor | None) -> Tensor:
    """Path scores of all candidates [B, C]; -inf below a slot's deepest level."""
    scores = [level.scores for level in levels]
    if max_level is not None:
        scores = [x.masked_fill((max_level < depth)[:, None], -torch.inf) for depth, x in enumerate(scores, start=1)]
    return torch.cat(scores, 1)


def _under_root(root: Tensor, rest: Tensor) -> Tensor:
    return torch.cat([root.to(rest.dtype)[:, None], rest], 1)


def link_tree(
    count: Tensor,
    tokens: Tensor,
    parent: Tensor,
    scores: Tensor,
    depth: int,
    edges: Tensor | None = None,
    source: Tensor | None = None,
) -> Tree:
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
        edges=edges,
        source=None if source is None else source.int(),
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
