"""The head's side of a round: one step over newly committed tokens, then level by level down to a tree.

Knows features, tokens and positions; what is accepted is decided elsewhere. Row i of the head pairs the feature of
position i with token i + 1 and has position i, so the first drafted level runs at the root's position.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from eagle3.heads.protocol import DraftHead
from eagle3.target import Target
from eagle3_infer.config import TreeConfig
from eagle3_infer.kv import Block, KVPool, PagedContext
from eagle3_kernels.build_tree import build_tree
from eagle3_kernels.expand_level import expand_level, grow_mask
from eagle3_kernels.structures import Level, Tree


@dataclass(frozen=True)
class Committed:
    """What one step of the target added, sequence after sequence.

    Args:
        features: of the committed positions [T, F].
        tokens: the token after each position [T]; a sequence's last one is its new root.
        counts: rows per sequence.
        slots: of each sequence.
        before: K/V rows of each sequence before these.
        levels: draft levels that are of use to each sequence.
    """

    features: Tensor
    tokens: Tensor
    counts: list[int]
    slots: list[int]
    before: list[int]
    levels: list[int]

    @property
    def lasts(self) -> list[int]:
        """Each sequence's last row."""
        return [end - 1 for end in accumulate(self.counts)]

    @property
    def roots(self) -> Tensor:
        """[B]"""
        return self.tokens[self.lasts]

    @property
    def after(self) -> list[int]:
        return [length + count for length, count in zip(self.before, self.counts, strict=True)]


class Drafter:
    """Drafts a tree below every root with the head; its K/V pool holds true features up to the roots.

    Attributes:
        tree: as asked for, but no wider than the draft vocabulary.
    """

    def __init__(self, target: Target, head: DraftHead, tree: TreeConfig):
        self.target, self.head, self.tree = target, head, tree.narrowed(head.draft_vocab_size)
        if tree.top_k > head.draft_vocab_size:
            warnings.warn(
                f"tree top_k {tree.top_k} is more than the draft vocabulary of {head.draft_vocab_size}; "
                "a node has no more children than that",
                stacklevel=3,
            )

    def first_step(self, pool: KVPool, committed: Committed) -> Tensor:
        """Overwrite the head's K/V of committed rows with true features; h [B, H] of each last row, the root's."""
        device = committed.tokens.device
        positions = [torch.arange(a, b, device=device) for a, b in zip(committed.before, committed.after, strict=True)]
        blocks = [
            Block(pool.view([slot], [before], (row - before)[None], queries=1), len(row))
            for slot, before, row in zip(committed.slots, committed.before, positions, strict=True)
        ]
        return self.head.step(
            self.head.start(committed.features),
            self.head.embed(committed.tokens, self.target),
            torch.cat(positions),
            PagedContext(pool, blocks),
            query_rows=torch.tensor(committed.lasts, device=device),
        )

    def levels(self, pool: KVPool, committed: Committed, h: Tensor) -> list[Level]:
        """Candidates of all levels that are of use; each frontier runs once, over its ancestors only. h [B, H]."""
        depth = min(self.tree.depth, max(committed.levels))
        if depth < 1:
            return []
        h, frontier = h[:, None], _Frontier(pool, committed.slots, committed.after)
        level = self._expand(h, torch.zeros(h.shape[:2], device=h.device))
        levels = [level]
        while len(levels) < depth:
            parents = level.frontier_parents.unsqueeze(-1).expand(-1, -1, h.shape[-1])
            h = self._run(frontier, h.gather(1, parents), level)
            level = self._expand(h, level.frontier_scores)
            levels.append(level)
        return levels

    def build(self, committed: Committed, levels: list[Level]) -> Tree:
        """The best nodes of all candidates below each root.

        Raises:
            FloatingPointError: logits of the head that are not finite.
        """
        if not levels:
            return Tree.bare(committed.roots)
        limits = torch.tensor(committed.levels, device=committed.tokens.device)
        tree = build_tree(
            committed.roots, levels, self.tree.nodes, limits if min(committed.levels) < len(levels) else None
        )
        if tree.scores.isnan().any():
            dtype = str(self.target.dtype).removeprefix("torch.")
            raise FloatingPointError(f"the head's logits are not finite in {dtype}; try bfloat16 or float32")
        return tree

    def _expand(self, h: Tensor, scores: Tensor) -> Level:
        log_q = self.head.logits(h).float().log_softmax(-1)
        level = expand_level(log_q, scores, self.tree.top_k)
        return level._replace(tokens=self.head.to_target(level.tokens))

    def _run(self, frontier: "_Frontier", h: Tensor, level: Level) -> Tensor:
        """One head step over a level's frontier [B, M, H]."""
        positions, ctx = frontier.extend(level.frontier_parents)
        embeds = self.head.embed(level.frontier_tokens.flatten(), self.target)
        return self.head.step(h.flatten(0, 1), embeds, positions, ctx).unflatten(0, h.shape[:2])


class _Frontier:
    """The drafted rows behind the committed ones in the head's pool: appended level by level, never re-run."""

    def __init__(self, pool: KVPool, slots: Sequence[int], lens: Sequence[int]):
        self.pool, self.slots, self.lens = pool, slots, lens
        self.levels: list[int] = []
        self.mask: Tensor | None = None

    def extend(self, parents: Tensor) -> tuple[Tensor, PagedContext]:
        """Positions [B * M] and context of the next level, given its nodes' parents [B, M]."""
        slots, width = parents.shape
        depth = self.levels[-1] + 1 if self.levels else 0
        self.mask = grow_mask(self.mask, parents, len(self.levels))
        self.levels += [depth] * width
        levels = torch.tensor(self.levels, device=parents.device).expand(slots, -1)
        view = self.pool.view(self.slots, self.lens, levels, self.mask, queries=width)
        positions = (view.lens.long() + depth).repeat_interleave(width)
        return positions, PagedContext(self.pool, [Block(view, width)])
