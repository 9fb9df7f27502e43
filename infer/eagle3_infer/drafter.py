"""The head's side of a round: one step over newly committed tokens, then level by level down to a tree.

Knows features, tokens and positions; what is accepted is decided elsewhere. Row i of the head pairs the feature of
position i with token i + 1 and has position i, so the first drafted level runs at the root's position.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from eagle3.heads.protocol import DraftHead
from eagle3.target import Target
from eagle3_infer.adaptive import Controller
from eagle3_infer.calibration import EdgeKind
from eagle3_infer.config import RuleConfig, TreeConfig
from eagle3_infer.kv import Block, KVPool, PagedContext
from eagle3_infer.proposals import Proposals, Propose
from eagle3_infer.running import Running
from eagle3_kernels.build_tree import build_tree
from eagle3_kernels.expand_level import expand_level, grow_mask
from eagle3_kernels.sample_nodes import mixed_ids
from eagle3_kernels.structures import Level, Tree
from eagle3_kernels.tree_attention import TreeView

# rows of features that a sequence keeps in plain stretches before the head reads them: memory, not speed, bounds it
MOST_BACKLOG = 2048


@dataclass(frozen=True)
class Draft:
    """Trees to verify.

    Args:
        log_q, target_ids: the distributions that drew their nodes [B, rows, Vd] (see Tree.source), and the target id
            of every draft id [Vd]; kept for the rejection rule only.
    """

    tree: Tree
    log_q: Tensor | None = None
    target_ids: Tensor | None = None

    @classmethod
    def bare(cls, tokens: Sequence[int], device: torch.device) -> "Draft":
        """Roots alone."""
        return cls(Tree.bare(torch.tensor(tokens, dtype=torch.int64, device=device)))

    def q(self, slot: int, row: int, vocab_size: int) -> Tensor:
        """The law [V] over target ids that drew the children of a tree row."""
        tree, log_q, target_ids = self.tree, self.log_q, self.target_ids
        assert log_q is not None and target_ids is not None and tree.source is not None
        drawn = log_q[slot, tree.source[slot, tree.first_child[slot, row]]].exp()
        return drawn.new_zeros(vocab_size).index_copy_(0, target_ids, drawn)


class Drafter:
    """Drafts a tree below every root with the head; its K/V pool holds true features up to the roots.

    Args:
        most_rows: that the head reads in one forward.
    Attributes:
        tree: as asked for, but no wider than the draft vocabulary.
        target_ids: target id of every draft id [Vd].
        mixed_ids: the same as the noise's hash takes them.
    """

    def __init__(self, target: Target, head: DraftHead, tree: TreeConfig, rule: RuleConfig, most_rows: int):
        self.target, self.head, self.rule, self.most_rows = target, head, rule, most_rows
        self.tree = tree.narrowed(head.draft_vocab_size)
        self.target_ids = head.to_target(torch.arange(head.draft_vocab_size, device=target.device))
        self.mixed_ids = mixed_ids(self.target_ids)
        if tree.top_k > head.draft_vocab_size:
            warnings.warn(
                f"tree top_k {tree.top_k} is more than the draft vocabulary of {head.draft_vocab_size}; "
                "a node has no more children than that",
                stacklevel=3,
            )

    def read(self, pool: KVPool, sequences: Sequence[Running]) -> Tensor:
        """The first draft step: the head's K/V of all committed rows that it has not seen, with true features.

        Returns:
            h [S, H] of each sequence's last row: the root's, where the sequence decodes.
        """
        states: dict[int, Tensor] = {}
        for batch in _batches(sequences, self.most_rows):
            h = self._read_rows(pool, batch)
            states |= {sequence.slot: row for (sequence, _), row in zip(batch, h, strict=True)}
        return torch.stack([states[sequence.slot] for sequence in sequences])

    def _read_rows(self, pool: KVPool, batch: list[tuple[Running, int]]) -> Tensor:
        device = self.target.device
        features, tokens, positions, blocks = [], [], [], []
        for sequence, rows in batch:
            before = sequence.head_length
            row = torch.arange(rows, device=device)
            blocks.append(Block(pool.view([sequence.slot], [before], row[None], queries=1), rows))
            positions.append(row + before)
            part, following = sequence.read(rows)
            features.append(part)
            tokens += following
        ends = list(accumulate(rows for _, rows in batch))
        ctx = PagedContext(pool, blocks)
        h = self.head.step(
            self.head.start(torch.cat(features)),
            self.head.embed(torch.tensor(tokens, device=device), self.target),
            torch.cat(positions),
            ctx,
            query_rows=torch.tensor([end - 1 for end in ends], device=device),
        )
        ctx.check_complete()
        return h

    def put_off(self, pool: KVPool, sequences: Sequence[Running]) -> None:
        """Keep what was committed for a later read; a backlog of more than MOST_BACKLOG rows is read at once."""
        for sequence in sequences:
            sequence.keep()
        long = [sequence for sequence in sequences if sequence.unread > MOST_BACKLOG]
        if long:
            self.read(pool, long)

    def levels(
        self,
        pool: KVPool,
        sequences: Sequence[Running],
        h: Tensor,
        useful: list[int],
        controller: Controller | None = None,
    ) -> "Levels":
        """Candidates of all levels that are of use; each frontier runs once, over its ancestors only.

        Args:
            h: of each sequence's root [B, H]; the head's pool holds all rows before the roots.
            useful: draft levels that are of use to each sequence.
            controller: calibrates edge scores and ends the drafting where trees adapt; None = as asked for.
        """
        propose = Proposals(self.rule, [s.sampler for s in sequences], [s.length for s in sequences], self.mixed_ids)
        drafted = Levels(useful, propose.kinds, controller)
        if self._deepest(drafted) < 1:
            return drafted
        slots, lens = [s.slot for s in sequences], [s.head_length for s in sequences]
        self.descend(propose, Frontier(pool, partial(pool.view, slots, lens)), h, drafted)
        return drafted

    def descend(self, propose: Propose, frontier: "Frontier", h: Tensor, drafted: "Levels") -> None:
        """Add the levels below the roots, whose states are h [B, H], to `drafted`."""
        h = h[:, None]
        level = self._expand(propose, h, torch.zeros(h.shape[:2], device=h.device), drafted)
        while self._deeper(drafted):
            parents = level.frontier_parents.unsqueeze(-1).expand(-1, -1, h.shape[-1])
            h = self._run(frontier, h.gather(1, parents), level)
            level = self._expand(propose, h, level.frontier_scores, drafted)

    def build(self, roots: Sequence[int], drafted: "Levels") -> Draft:
        """The best nodes of all candidates below each root.

        Raises:
            FloatingPointError: logits of the head that are not finite.
        """
        device = self.target.device
        if not drafted.levels:
            return Draft.bare(roots, device)
        tokens = torch.tensor(roots, dtype=torch.int64, device=device)
        shallow = min(drafted.useful) < len(drafted.levels)
        deepest = torch.tensor(drafted.useful, device=device) if shallow else None
        nodes, limit = self.tree.nodes, None
        if drafted.controller is not None:
            limit = drafted.controller.pick([level.scores for level in drafted.levels])
            nodes = int(limit.max())
            if not nodes:
                return Draft.bare(roots, device)
        tree = build_tree(tokens, drafted.levels, nodes, deepest, limit)
        if tree.scores.isnan().any():
            raise head_not_finite(self.target.dtype)
        log_q = torch.cat(drafted.log_q, 1) if drafted.log_q else None
        return Draft(tree, log_q, None if log_q is None else self.target_ids)

    def _expand(self, propose: Propose, h: Tensor, scores: Tensor, drafted: "Levels") -> Level:
        """Add the level below a frontier with states h [B, M, H] and path scores [B, M]."""
        number = len(drafted.levels) + 1
        found = propose(self.head.logits(h), number)
        weigh = partial(self._weigh, level=number, drafted=drafted)
        level = expand_level(found.keys, scores, self.tree.top_k, found.edge, weigh)
        level = level._replace(tokens=self.target_ids[level.tokens])
        drafted.levels.append(level)
        if propose.keeps_q:
            drafted.log_q.append(found.log_q)
        return level

    def _deepest(self, drafted: "Levels") -> int:
        return min(self.tree.depth, max(drafted.useful))

    def _deeper(self, drafted: "Levels") -> bool:
        """Whether one more level is of use and, where trees adapt, promises to pay."""
        if len(drafted.levels) >= self._deepest(drafted):
            return False
        controller = drafted.controller
        return controller is None or controller.deepen([level.scores for level in drafted.levels])

    def _weigh(self, edges: Tensor, level: int, drafted: "Levels") -> Tensor:
        """What edge scores add to path scores: calibrated where trees adapt, times the score policy's weight."""
        if drafted.controller is not None:
            edges = drafted.controller.weigh(edges, level, drafted.kinds)
        weight = self.tree.level_weight ** (level - 1)
        return edges if weight == 1 else edges * weight

    def _run(self, frontier: "Frontier", h: Tensor, level: Level) -> Tensor:
        """One head step over a level's frontier [B, M, H]."""
        positions, ctx = frontier.extend(level.frontier_parents)
        embeds = self.head.embed(level.frontier_tokens.flatten(), self.target)
        return self.head.step(h.flatten(0, 1), embeds, positions, ctx).unflatten(0, h.shape[:2])


@dataclass
class Levels:
    """What a round drafted: levels, and the laws that drew them where they are kept.

    Args:
        useful: draft levels that are of use to each slot; kinds: what its edge scores are.
        controller: what sizes this round's trees; None = as asked for.
    """

    useful: list[int]
    kinds: list[EdgeKind]
    controller: Controller | None = None
    levels: list[Level] = field(default_factory=list)
    log_q: list[Tensor] = field(default_factory=list)


class Frontier:
    """The drafted rows behind the committed ones in the head's pool: appended level by level, never re-run."""

    def __init__(self, pool: KVPool, view: Callable[[Tensor, Tensor, int], TreeView]):
        """view: of drafted rows at levels [B, A], seen by the last queries of them as a packed mask says."""
        self.pool, self.view = pool, view
        self.depth = 0
        self.mask: Tensor | None = None

    def extend(self, parents: Tensor) -> tuple[Tensor, PagedContext]:
        """Positions [B * M] and context of the next level, given its nodes' parents [B, M]; M is that of all levels."""
        slots, width = parents.shape
        self.mask = grow_mask(self.mask, parents, self.depth * width)
        levels = torch.arange((self.depth + 1) * width, device=parents.device) // width
        view = self.view(levels.expand(slots, -1), self.mask, width)
        positions = (view.lens.long() + self.depth)[:, None].expand(-1, width).flatten()
        self.depth += 1
        return positions, PagedContext(self.pool, [Block(view, width)])


def head_not_finite(dtype: torch.dtype) -> FloatingPointError:
    """The error for NaN among the scores of a tree."""
    name = str(dtype).removeprefix("torch.")
    return FloatingPointError(f"the head's logits are not finite in {name}; try bfloat16 or float32")


def _batches(sequences: Sequence[Running], most_rows: int) -> Iterator[list[tuple[Running, int]]]:
    """All unread rows in order, `most_rows` at a time; a long backlog is cut."""
    batch, left = [], most_rows
    for sequence in sequences:
        unread = sequence.unread
        while unread:
            rows = min(left, unread)
            batch.append((sequence, rows))
            left, unread = left - rows, unread - rows
            if not left:
                yield batch
                batch, left = [], most_rows
    if batch:
        yield batch
