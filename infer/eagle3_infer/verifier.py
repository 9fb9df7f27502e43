"""The target's side of a round: one packed forward over trees and prompts, then the walk that its rule accepts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from eagle3.capture import Capture
from eagle3.target import Target
from eagle3_infer.config import RuleConfig
from eagle3_infer.drafter import Draft
from eagle3_infer.kv import Block, KVPool, PagedContext
from eagle3_infer.rules import RoundRule
from eagle3_infer.running import Chunk, Running
from eagle3_infer.sampling import log_prob
from eagle3_kernels.gather_first_step import gather_first_step
from eagle3_kernels.sample_nodes import check_tokens, greedy_nodes
from eagle3_kernels.structures import Tree, Walk


@dataclass(frozen=True)
class Forward:
    """One packed forward.

    Args:
        tree_logits: a row per tree row in use [T, V].
        prompt_logits: of the last row of each prompt that ends in it [P, V].
        starts: first packed row of each sequence, trees before chunks of prompts.
    """

    tree_logits: Tensor
    prompt_logits: Tensor
    starts: list[int]


@dataclass(frozen=True)
class Accepted:
    """What a round accepted of each running sequence's tree.

    Args:
        paths: accepted rows, root first; features: the same as rows of the feature buffer; runs: the tokens after
            them. Host lists, copied once.
        logprobs: of the runs, where they are wanted.
    """

    paths: list[list[int]]
    features: list[list[int]]
    runs: list[list[int]]
    logprobs: list[list[float]]


@dataclass(frozen=True)
class Walked(Accepted):
    """Accepted rows that are still where the forward put them.

    Args:
        walk: as the op gives it.
    """

    walk: Walk


class Verifier:
    """Runs the target over the roots' trees and over new prompts, in one packed row."""

    def __init__(self, target: Target, capture_layers: tuple[int, ...], rule: RuleConfig):
        self.target, self.rule = target, rule
        self.capture = Capture(target, capture_layers, max_rows=0)

    def reserve(self, rows: int) -> None:
        """Make the feature buffer hold a forward of so many rows; kept while it does."""
        held = self.capture.buffer
        if held is not None and rows > held.shape[0]:
            self.capture = Capture(self.target, self.capture.layers, max_rows=rows)

    def forward(
        self, pool: KVPool, tree: Tree, counts: Sequence[int], running: Sequence[Running], chunks: Sequence[Chunk]
    ) -> Forward:
        """Trees are verified at their roots' positions, prompts are read on from where they are.

        Args:
            counts: rows in use of each running sequence's tree.
        """
        ids, positions, blocks = self._tree_rows(pool, tree, counts, running)
        for chunk in chunks:
            row = torch.arange(chunk.rows, device=self.target.device)
            ids.append(torch.tensor(chunk.tokens, device=self.target.device))
            positions.append(row + chunk.before)
            blocks.append(Block(pool.view([chunk.sequence.slot], [chunk.before], row[None]), chunk.rows))
        ends = list(accumulate([*counts, *(chunk.rows for chunk in chunks)]))
        ctx = PagedContext(pool, blocks)
        # hooks of another engine's capture would take this forward's rows
        with self.target.lock, self.capture.rows(ends[-1]):
            hidden = self.target.hidden(torch.cat(ids), torch.cat(positions), ctx)
        ctx.check_complete()
        tree_rows = sum(counts)
        if chunks:
            last = [end - 1 for end, chunk in zip(ends[len(running) :], chunks, strict=True) if chunk.last]
            hidden = hidden[[*range(tree_rows), *last]]
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

    def accept(self, forward: Forward, draft: Draft, running: Sequence[Running]) -> Walked:
        """Walk each running sequence's tree along what its rule accepts."""
        starts = torch.tensor(forward.starts[: len(running)], dtype=torch.int64, device=self.target.device)
        rule = RoundRule(self.rule, forward.tree_logits, forward.starts, draft, running)
        walk = rule.walk()
        step = gather_first_step(draft.tree, walk, starts)
        window = walk.path.shape[1]
        rows = torch.cat([walk.path, step.rows, step.tokens, step.count[:, None]], 1).tolist()
        paths, features, runs = ([row[at : at + row[-1]] for row in rows] for at in (0, window, 2 * window))
        check_tokens([token for run in runs for token in run], self.target.dtype)
        return Walked(paths, features, runs, rule.logprobs, walk)

    def first_tokens(self, forward: Forward, sequences: Sequence[Running]) -> list[tuple[int, list[float]]]:
        """The token after each prompt that was read to its end, and its log-probability where that is wanted."""
        if not sequences:
            return []
        logits = forward.prompt_logits
        if all(sequence.sampler.plain_greedy for sequence in sequences):
            return [(token, []) for token in greedy_nodes(logits).tolist()]
        found = []
        for row, sequence in zip(logits, sequences, strict=True):
            token = sequence.sampler.choose(row, sequence.prompt_length, sequence.tokens)
            found.append((token, [log_prob(row, token)] if sequence.sampler.logprobs else []))
        return found
