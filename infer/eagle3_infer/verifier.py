"""The target's side of a round: one packed forward over trees and prompts, then the walk along its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from eagle3.capture import Capture
from eagle3.target import Target
from eagle3_infer.kv import Block, KVPool, PagedContext
from eagle3_infer.running import Running
from eagle3_infer.sampling import draw_all
from eagle3_kernels.gather_first_step import gather_first_step
from eagle3_kernels.sample_nodes import greedy_nodes
from eagle3_kernels.structures import FirstStep, Tree, Walk
from eagle3_kernels.verify_tree import Decide, match, verify_tree


@dataclass(frozen=True)
class Forward:
    """One packed forward.

    Args:
        tree_logits: a row per tree row in use [T, V].
        prompt_logits: of each prompt's last row [P, V].
        starts: first packed row of each sequence, trees before prompts.
    """

    tree_logits: Tensor
    prompt_logits: Tensor
    starts: list[int]


@dataclass(frozen=True)
class Accepted:
    """What a round accepted of each running sequence's tree.

    Args:
        walk, step: as the ops give them.
        paths: accepted rows, root first; runs: the tokens after them. Host lists, copied once.
    """

    walk: Walk
    step: FirstStep
    paths: list[list[int]]
    runs: list[list[int]]


class Verifier:
    """Runs the target over the roots' trees and over new prompts, in one packed row."""

    def __init__(self, target: Target, capture_layers: tuple[int, ...]):
        self.target = target
        self.capture = Capture(target, capture_layers, max_rows=0)

    def reserve(self, rows: int) -> None:
        """Make the feature buffer hold a forward of so many rows; kept while it does."""
        held = self.capture.buffer
        if held is not None and rows > held.shape[0]:
            self.capture = Capture(self.target, self.capture.layers, max_rows=rows)

    def forward(
        self,
        pool: KVPool,
        tree: Tree,
        counts: Sequence[int],
        running: Sequence[Running],
        joined: Sequence[Running],
    ) -> Forward:
        """Trees are verified at their roots' positions, prompts are read from position 0.

        Args:
            counts: rows in use of each running sequence's tree.
        """
        ids, positions, blocks = self._tree_rows(pool, tree, counts, running)
        for sequence in joined:
            row = torch.arange(sequence.prompt_length, device=self.target.device)
            ids.append(torch.tensor(sequence.tokens, device=self.target.device))
            positions.append(row)
            blocks.append(Block(pool.view([sequence.slot], [0], row[None]), len(row)))
        ends = list(accumulate([*counts, *(s.prompt_length for s in joined)]))
        with self.capture.rows(ends[-1]):
            hidden = self.target.hidden(torch.cat(ids), torch.cat(positions), PagedContext(pool, blocks))
        tree_rows = sum(counts)
        if joined:
            hidden = hidden[[*range(tree_rows), *(end - 1 for end in ends[len(running) :])]]
        logits = self.target.logits(hidden)
        return Forward(logits[:tree_rows], logits[tree_rows:], [0, *ends[:-1]])

    def _tree_rows(self, pool: KVPool, tree: Tree, counts: Sequence[int], running: Sequence[Running]):
        """Packed ids, positions and blocks; neighbours with trees of one size share a block."""
        ids, positions, blocks = [], [], []
        for count, members in groupby(range(len(running)), key=counts.__getitem__):
            slots = list(members)
            span = slice(slots[0], slots[-1] + 1)
            level, mask = tree.position[span, :count], tree.ancestor_mask[span, :count]
            lens = [running[b].length for b in slots]
            view = pool.view([running[b].slot for b in slots], lens, level, None if count == 1 else mask)
            ids.append(tree.tokens[span, :count].flatten().long())
            positions.append((view.lens[:, None] + level).flatten().long())
            blocks.append(Block(view, count))
        return ids, positions, blocks

    def accept(self, forward: Forward, tree: Tree, running: Sequence[Running]) -> Accepted:
        """Walk each running sequence's tree along the target's tokens."""
        starts = torch.tensor(forward.starts[: len(running)], dtype=torch.int64, device=self.target.device)
        walk = verify_tree(tree, _target_tokens(forward, tree, starts, running))
        step = gather_first_step(tree, walk, starts)
        window = walk.path.shape[1]
        rows = torch.cat([walk.path, step.tokens, step.count[:, None]], 1).tolist()
        paths = [row[: row[-1]] for row in rows]
        return Accepted(walk, step, paths, [row[window : window + row[-1]] for row in rows])

    def first_tokens(self, forward: Forward, joined: Sequence[Running]) -> list[int]:
        """The token after each prompt."""
        if not joined:
            return []
        return draw_all([s.sampler for s in joined], forward.prompt_logits, [s.prompt_length for s in joined])


def _target_tokens(forward: Forward, tree: Tree, starts: Tensor, running: Sequence[Running]) -> Tensor | Decide:
    """Greedy tokens of all rows at once; where any is sampled or forced, a function asked at visited rows only."""
    samplers = [sequence.sampler for sequence in running]
    best = greedy_nodes(forward.tree_logits) if any(s.greedy for s in samplers) else None
    if best is not None and all(s.greedy and not s.forced for s in samplers):
        rows = starts[:, None] + torch.arange(tree.tokens.shape[1], device=starts.device)
        # rows that a tree does not use are never visited
        return best[rows.clamp(max=len(best) - 1)]
    greedy = None if best is None else best.tolist()

    def decide(slot: int, row: int, level: int, children: list[int]) -> tuple[int, int]:
        return match(token(slot, row, level), children)

    def token(slot: int, row: int, level: int) -> int:
        sampler, at = samplers[slot], forward.starts[slot] + row
        # the token after a row stands one position further
        position = running[slot].length + level + 1
        forced = sampler.forced_token(position)
        if forced is not None:
            return forced
        return greedy[at] if greedy is not None and sampler.greedy else sampler.draw(forward.tree_logits[at], position)

    return decide
