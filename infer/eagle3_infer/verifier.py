"""The target's side of a round: one packed forward over trees and prompts, then the walk along its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from eagle3.capture import Capture
from eagle3.target import Target
from eagle3_infer.kv import Block, KVPool, PagedContext
from eagle3_infer.running import Running
from eagle3_kernels.sample_nodes import greedy_nodes
from eagle3_kernels.structures import Tree
from eagle3_kernels.verify_tree import walk_slot


class TreeRows:
    """The trees of a round as host lists, made once: the walk and the counters read them."""

    def __init__(self, tree: Tree):
        self.tree = tree
        self.count = tree.count.tolist()
        self.tokens = tree.tokens.tolist()
        self.parent = tree.parent.tolist()
        self.level = tree.position.tolist()
        self.first_child = tree.first_child.tolist()
        self.next_sibling = tree.next_sibling.tolist()


@dataclass(frozen=True)
class Forward:
    """Logits of one packed forward, and the first row of each sequence in the packed row.

    logits: a row per tree row, then one per prompt (its last).
    """

    logits: Tensor
    starts: list[int]


class Verifier:
    """Runs the target over the roots' trees and over new prompts, in one packed row."""

    def __init__(self, target: Target, capture_layers: tuple[int, ...]):
        self.target = target
        self.capture = Capture(target, capture_layers, max_rows=0)

    def forward(self, pool: KVPool, trees: TreeRows, running: Sequence[Running], joined: Sequence[Running]) -> Forward:
        """Trees are verified at their roots' positions, prompts are read from position 0."""
        ids, positions, blocks = self._tree_rows(pool, trees, running)
        for sequence in joined:
            row = torch.arange(sequence.prompt_length, device=self.target.device)
            ids.append(torch.tensor(sequence.tokens, device=self.target.device))
            positions.append(row)
            blocks.append(Block(pool.view([sequence.slot], [0], row[None]), len(row)))
        counts = [*trees.count[: len(running)], *(s.prompt_length for s in joined)]
        self._reserve(sum(counts))
        with self.capture.rows(sum(counts)):
            hidden = self.target.hidden(torch.cat(ids), torch.cat(positions), PagedContext(pool, blocks))
        starts = [0, *accumulate(counts)]
        if joined:
            tree_rows = starts[len(running)]
            lasts = [end - 1 for end in starts[len(running) + 1 :]]
            hidden = hidden[[*range(tree_rows), *lasts]]
        return Forward(self.target.logits(hidden), starts[:-1])

    def _tree_rows(self, pool: KVPool, trees: TreeRows, running: Sequence[Running]):
        """Packed ids, positions and blocks; neighbours with trees of one size share a block."""
        ids, positions, blocks = [], [], []
        for count, members in groupby(range(len(running)), key=trees.count.__getitem__):
            slots = list(members)
            span, tree = slice(slots[0], slots[-1] + 1), trees.tree
            level, mask = tree.position[span, :count], tree.ancestor_mask[span, :count]
            lens = [running[b].length for b in slots]
            view = pool.view([running[b].slot for b in slots], lens, level, None if count == 1 else mask)
            ids.append(tree.tokens[span, :count].flatten().long())
            positions.append((view.lens[:, None] + level).flatten().long())
            blocks.append(Block(view, count))
        return ids, positions, blocks

    def _reserve(self, rows: int) -> None:
        held = self.capture.buffer
        if held is not None and rows > held.shape[0]:
            self.capture = Capture(self.target, self.capture.layers, max_rows=max(rows, 2 * held.shape[0]))

    def walk(self, forward: Forward, trees: TreeRows, running: Sequence[Running]) -> list[tuple[list[int], int]]:
        """Accepted rows (root first) and the next token of each running sequence."""
        draw = _Draws(forward.logits, [*running])
        return [
            walk_slot(
                trees.tokens[b],
                trees.first_child[b],
                trees.next_sibling[b],
                trees.tree.depth,
                _chooser(draw, sequence, forward.starts[b], trees.level[b]),
            )
            for b, sequence in enumerate(running)
        ]

    def first_tokens(self, forward: Forward, joined: Sequence[Running]) -> list[int]:
        """The token after each prompt."""
        rows = forward.logits[len(forward.logits) - len(joined) :]
        draw = _Draws(rows, joined)
        return [draw(sequence, row, sequence.prompt_length) for row, sequence in enumerate(joined)]


class _Draws:
    """The target's token at a row: greedy ones all at once, sampled ones only where a walk asks."""

    def __init__(self, logits: Tensor, sequences: Sequence[Running]):
        self.logits = logits
        greedy = any(sequence.sampler.greedy for sequence in sequences)
        self.best = greedy_nodes(logits).tolist() if greedy else []

    def __call__(self, sequence: Running, row: int, position: int) -> int:
        forced = sequence.sampler.forced_token(position)
        if forced is not None:
            return forced
        return self.best[row] if sequence.sampler.greedy else sequence.sampler.draw(self.logits[row], position)


def _chooser(draw: _Draws, sequence: Running, start: int, levels: list[int]) -> Callable[[int], int]:
    # the token after a row stands one position further
    return lambda row: draw(sequence, start + row, sequence.length + levels[row] + 1)
