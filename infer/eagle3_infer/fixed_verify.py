"""The verify half of a round in fixed shapes: the target's forward, the walk, and the accepted rows put in place."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from eagle3.target import Target
from eagle3_infer.config import MATCH, RuleConfig
from eagle3_infer.drafter import Draft, head_not_finite
from eagle3_infer.fixed_buffers import Buffers, Shape, SlotTable
from eagle3_infer.graphs import GraphCache
from eagle3_infer.kv import Block, KVPool, PagedContext
from eagle3_infer.rules import RoundRule
from eagle3_infer.running import Running
from eagle3_infer.sampling import Sampler
from eagle3_infer.verifier import Accepted
from eagle3_kernels.gather_first_step import gather_first_step
from eagle3_kernels.relocate_kv import relocate_kv
from eagle3_kernels.sample_nodes import check_tokens, greedy_nodes, sample_rows
from eagle3_kernels.structures import Walk
from eagle3_kernels.tree_attention import TreeView
from eagle3_kernels.verify_tree import verify_tree


class FixedVerifier:
    """Verifies the trees in the buffers.

    Args:
        pool: the target's; width: pages of a slot that are looked at.
        rule: where the device cannot decide by it, the host does, between two graphs.
    """

    def __init__(
        self, target: Target, rule: RuleConfig, pool: KVPool, width: int, buffers: Buffers, graphs: GraphCache
    ):
        self.target, self.rule, self.pool, self.width = target, rule, pool, width
        self.buffers, self.graphs = buffers, graphs
        slots, window = buffers.step.rows.shape
        self.table = SlotTable(("slot", "length", "root", "seed"), ("temperature", "min_p"), slots, target.device)
        path = torch.zeros(slots, window, dtype=torch.int32, device=target.device)
        # what the host decided
        self.walk = Walk(path, path[:, 0].clone(), path[:, 0].clone())
        # path, tokens after it, their number, whether the tree holds NaN, parents
        told = 2 * window + 2 + max(shape.rows for shape in buffers.trees)
        self.told = torch.zeros(slots, told, dtype=torch.int32, device=target.device)

    def __call__(
        self, draft: Draft, running: Sequence[Running], rows: int, shape: Shape
    ) -> tuple[Accepted, list[list[int]]]:
        """Verify the trees of `running`, the first of `rows` in the buffers and the same as in `draft`.

        Returns:
            what was accepted, and the parents of each tree's rows in use.
        Raises:
            FloatingPointError: logits that are not finite: the target's, or the head's when it drafted a tree.
        """
        self._send(running, rows)
        samplers = [sequence.sampler for sequence in running]
        if all(map(self._fuses, samplers)):
            noisy = not all(sampler.greedy for sampler in samplers)
            self.graphs.run(("verify", rows, shape, noisy), partial(self._verify, rows, shape, noisy))
            logprobs: list[list[float]] = [[] for _ in running]
        else:
            logits = self.graphs.run(("forward", rows, shape), partial(self._forward, rows, shape))
            logprobs = self._decide(logits, draft, running, shape)
            self.graphs.run(("accept", rows, shape), partial(self._accept, rows, shape, first(self.walk, rows)))
        return self._read(logprobs, shape)

    def prepare(self, samplers: Sequence[Sampler], rows: int, shape: Shape) -> None:
        """Capture what requests of such samplers replay; padding alone is verified."""
        self._send([], rows)
        for noisy in {not sampler.greedy for sampler in samplers if self._fuses(sampler)}:
            self.graphs.prepare(("verify", rows, shape, noisy), partial(self._verify, rows, shape, noisy))
        if not all(map(self._fuses, samplers)):
            self.graphs.prepare(("forward", rows, shape), partial(self._forward, rows, shape))
            self.graphs.prepare(("accept", rows, shape), partial(self._accept, rows, shape, first(self.walk, rows)))

    def _fuses(self, sampler: Sampler) -> bool:
        """Whether the device decides its walks."""
        return self.rule.rule == MATCH and sampler.fusable

    def _send(self, running: Sequence[Running], rows: int) -> None:
        samplers, padding = [sequence.sampler for sequence in running], [0] * (rows - len(running))
        self.table.send(
            slot=[sequence.slot for sequence in running] + [self.pool.spare_slot] * len(padding),
            length=[sequence.length for sequence in running] + padding,
            root=[sequence.root for sequence in running] + padding,
            seed=[sampler.seed for sampler in samplers] + padding,
            temperature=[sampler.filters.temperature for sampler in samplers] + padding,
            min_p=[sampler.filters.min_p for sampler in samplers] + padding,
        )

    def _verify(self, rows: int, shape: Shape, noisy: bool) -> None:
        logits = self._forward(rows, shape)
        tokens = self._sample(logits, rows, shape) if noisy else greedy_nodes(logits, checked=False)
        self._accept(rows, shape, verify_tree(self.buffers.tree(shape, rows), tokens.view(rows, shape.rows)))

    def _forward(self, rows: int, shape: Shape) -> Tensor:
        """Logits [B * N, V] of all rows of the trees, in use or not."""
        tree, lens = self.buffers.tree(shape, rows), self.table["length"][:rows].int()
        # roots alone are not drafted: the host knows them
        ids, mask = (tree.tokens, tree.ancestor_mask) if shape.nodes else (self.table["root"][:rows], None)
        view = TreeView(self._pages(rows), lens, tree.position, mask, shape.rows)
        positions = (lens[:, None] + tree.position).flatten().long()
        ctx = PagedContext(self.pool, [Block(view, shape.rows)])
        with self.target.lock, self.buffers.capture.rows(rows * shape.rows):
            hidden = self.target.hidden(ids.flatten().long(), positions, ctx)
        ctx.check_complete()
        return self.target.logits(hidden)

    def _sample(self, logits: Tensor, rows: int, shape: Shape) -> Tensor:
        """The target's draw after every tree row [B * N]; it stands one position further."""
        positions = self.table["length"][:rows, None] + self.buffers.tree(shape, rows).position + 1
        names = ("temperature", "seed", "min_p")
        heat, seeds, min_p = (self.table[name][:rows, None].expand_as(positions).flatten() for name in names)
        return sample_rows(logits, heat.float(), seeds, positions.flatten(), min_p.float())

    def _decide(self, logits: Tensor, draft: Draft, running: Sequence[Running], shape: Shape) -> list[list[float]]:
        """Walk by the requests' own rules, on the host; returns the log-probabilities that are wanted."""
        starts = range(0, len(running) * shape.rows, shape.rows)
        rule = RoundRule(self.rule, logits, starts, draft, running)
        found = rule.walk()
        slots, window = found.path.shape
        self.walk.path.fill_(-1)
        self.walk.path[:slots, :window] = found.path
        self.walk.accepted[:slots], self.walk.bonus[:slots] = found.accepted, found.bonus
        return rule.logprobs

    def _accept(self, rows: int, shape: Shape, walk: Walk) -> None:
        """Move the accepted rows into place; note what the draft and the host want to know."""
        tree = self.buffers.tree(shape, rows)
        starts = torch.arange(0, rows * shape.rows, shape.rows, device=walk.path.device)
        step = gather_first_step(tree, walk, starts)
        for kept, found in zip(self.buffers.step, step, strict=True):
            kept[:rows] = found
        relocate_kv(self.pool.tensors, self._pages(rows), self.table["length"][:rows], walk.path)
        broken = tree.scores.isnan().any(1)
        told = torch.cat([walk.path, step.tokens, step.count[:, None], broken[:, None], tree.parent], 1)
        self.told[:rows, : told.shape[1]] = told

    def _pages(self, rows: int) -> Tensor:
        return self.pool.table[self.table["slot"][:rows], : self.width]

    def _read(self, logprobs: list[list[float]], shape: Shape) -> tuple[Accepted, list[list[int]]]:
        """The one wait of the round."""
        w, paths, features, runs, parents = self.buffers.window, [], [], [], []
        for slot, row in enumerate(self.told[: len(logprobs)].tolist()):
            path, tokens, (count, broken), above = row[:w], row[w : 2 * w], row[2 * w : 2 * w + 2], row[2 * w + 2 :]
            if broken:
                raise head_not_finite(self.target.dtype)
            check_tokens(tokens[:count], self.target.dtype)
            paths.append(path[:count])
            features.append([slot * shape.rows + at for at in path[:count]])
            runs.append(tokens[:count])
            parents.append(above[: 1 + sum(parent >= 0 for parent in above[: shape.rows])])
        return Accepted(paths, features, runs, logprobs), parents


def first(walk: Walk, rows: int) -> Walk:
    return Walk(*(part[:rows] for part in walk))
