"""What the ops hand to each other: a drafted level, the finished tree, an accepted path."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Level(NamedTuple):
    """One drafted level: every candidate child, and which of them are expanded next.

    tokens, parents [B, C] int64 (parents = frontier rows of the level above), scores [B, C] fp32 path scores,
    chosen [B, M] int64: candidates that form this level's frontier, best first; edges [B, C] fp32 edge scores as the
    drafter gave them, before any weighing.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    chosen: Tensor
    edges: Tensor

    @property
    def frontier_tokens(self) -> Tensor:
        """[B, M]"""
        return self.tokens.gather(1, self.chosen)

    @property
    def frontier_parents(self) -> Tensor:
        """[B, M]"""
        return self.parents.gather(1, self.chosen)

    @property
    def frontier_scores(self) -> Tensor:
        """[B, M]"""
        return self.scores.gather(1, self.chosen)


class Walk(NamedTuple):
    """An accepted path per slot: tree rows [B, D + 1] (root first, -1 padded), accepted drafts [B], next token [B]."""

    path: Tensor
    accepted: Tensor
    bonus: Tensor


class FirstStep(NamedTuple):
    """Inputs of the first draft step in a fixed window of D + 1 rows per slot; rows from `count` on are padding.

    rows [B, D + 1] into the feature buffer, tokens [B, D + 1] (what the round commits), count [B].
    """

    rows: Tensor
    tokens: Tensor
    count: Tensor


@dataclass(frozen=True)
class Tree:
    """B draft trees of up to N rows: row 0 is the root, parents come before children, int32 throughout.

    Args:
        count: rows in use [B]; 1 = a bare root.
        tokens: target ids [B, N].
        parent: row of the parent [B, N], -1 at the root and in unused rows.
        position: level [B, N], 0 at the root.
        ancestor_mask: bits of the rows on the path from the root, itself included [B, N, ceil(N / 32)];
            unused rows hold only themselves.
        first_child, next_sibling: rows [B, N], best first, -1 where there is none.
        scores: path scores [B, N] fp32, 0 at the root, -inf in unused rows.
        depth: levels that the tree may have; bounds every walk.
        edges: edge scores as drafted [B, N] fp32; None where nothing was drafted.
        source: which of the drafter's distributions drew the node [B, N]: those of level 1's frontier (one row, the
            root's) come first, then level 2's, ...; -1 at the root and in unused rows.
    """

    count: Tensor
    tokens: Tensor
    parent: Tensor
    position: Tensor
    ancestor_mask: Tensor
    first_child: Tensor
    next_sibling: Tensor
    scores: Tensor
    depth: int
    edges: Tensor | None = None
    source: Tensor | None = None

    @classmethod
    def bare(cls, tokens: Tensor) -> "Tree":
        """Roots alone: a round on them is plain decoding. tokens [B]."""
        column = tokens.to(torch.int32)[:, None]
        none = torch.full_like(column, -1)
        return cls(
            count=torch.ones_like(column[:, 0]),
            tokens=column,
            parent=none,
            position=torch.zeros_like(column),
            ancestor_mask=torch.ones_like(column)[..., None],
            first_child=none,
            next_sibling=none,
            scores=torch.zeros(column.shape, device=tokens.device),
            depth=0,
        )

    def used_parents(self) -> list[list[int]]:
        """Each slot's `parent` as a host list of its rows in use, in one copy."""
        return [row[: 1 + sum(above >= 0 for above in row)] for row in self.parent.tolist()]

    def paths(self, slot: int = 0) -> Tensor:
        """EAGLE's retrieve_indices of one slot: root-to-leaf rows [leaves, deepest level + 1], padded with -1."""
        parent = self.parent[slot].tolist()
        leaves = [r for r in range(int(self.count[slot])) if int(self.first_child[slot, r]) < 0]
        chains = [_root_path(parent, leaf) for leaf in leaves]
        width = max(map(len, chains))
        return torch.tensor([chain + [-1] * (width - len(chain)) for chain in chains], dtype=torch.int32)


def _root_path(parent: list[int], row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parent[row]
    return path[::-1]
