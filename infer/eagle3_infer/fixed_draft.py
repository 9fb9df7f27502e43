"""The draft half of a round in fixed shapes: the head reads a window of committed rows, then drafts level by level."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from eagle3_infer.config import SHARED_NOISE
from eagle3_infer.drafter import Drafter, Frontier, Levels
from eagle3_infer.fixed_buffers import Buffers, Shape, SlotTable, copy_tree
from eagle3_infer.graphs import GraphCache
from eagle3_infer.kv import Block, KVPool, PagedContext
from eagle3_infer.proposals import Proposal, by_perturbed_law, noisy_keys
from eagle3_infer.running import Running
from eagle3_infer.sampling import Sampler
from eagle3_kernels.build_tree import build_tree
from eagle3_kernels.sample_nodes import Purpose
from eagle3_kernels.sample_nodes.noise import keyed_gumbel
from eagle3_kernels.structures import FirstStep
from eagle3_kernels.tree_attention import TreeView


class FixedDrafter:
    """Drafts into the buffers below what the last verification committed.

    Args:
        pool: the head's; width: pages of a slot that are looked at.
    """

    def __init__(self, drafter: Drafter, pool: KVPool, width: int, buffers: Buffers, graphs: GraphCache):
        self.drafter, self.head, self.pool, self.width = drafter, drafter.head, pool, width
        self.buffers, self.graphs = buffers, graphs
        slots, device = len(buffers.step.count), drafter.target.device
        self.table = SlotTable(("slot", "length", "seed", "row", "useful"), ("temperature",), slots, device)

    def __call__(self, running: Sequence[Running], verified: Sequence[int], rows: int, shape: Shape) -> None:
        """Draft for `running`, padded to `rows`; the rows that the head reads count as read.

        Args:
            verified: batch row of each sequence in the verification.
        """
        self._send(running, verified, rows)
        noisy = self._noisy([sequence.sampler for sequence in running])
        self.graphs.run(("draft", rows, shape, noisy), partial(self._draft, rows, shape, noisy))
        for sequence in running:
            sequence.head_length = sequence.length

    def prepare(self, samplers: Sequence[Sampler], rows: int, shape: Shape) -> None:
        """Capture what requests of such samplers replay; padding alone is drafted for."""
        self._send([], [], rows)
        for noisy in {self._noisy([sampler]) for sampler in samplers}:
            self.graphs.prepare(("draft", rows, shape, noisy), partial(self._draft, rows, shape, noisy))

    def _noisy(self, samplers: Sequence[Sampler]) -> bool:
        return self.drafter.rule.draft_noise == SHARED_NOISE and not all(sampler.greedy for sampler in samplers)

    def _send(self, running: Sequence[Running], verified: Sequence[int], rows: int) -> None:
        samplers, padding = [sequence.sampler for sequence in running], [0] * (rows - len(running))
        # a padded row reads the first row's window, and no level is of use to it: its tree stays a bare root
        self.table.send(
            slot=[sequence.slot for sequence in running] + [self.pool.spare_slot] * len(padding),
            length=[sequence.head_length for sequence in running] + padding,
            row=[*verified, *padding],
            useful=[sequence.useful_levels for sequence in running] + padding,
            seed=[sampler.seed for sampler in samplers] + padding,
            temperature=[sampler.filters.temperature for sampler in samplers] + padding,
        )

    def _draft(self, rows: int, shape: Shape, noisy: bool) -> None:
        step = FirstStep(*(part[self.table["row"][:rows]] for part in self.buffers.step))
        last = (step.count[:, None] - 1).long()
        roots, h = step.tokens.gather(1, last)[:, 0].long(), self._read(step, last)
        lens = (self.table["length"][:rows] + step.count).int()
        heat, seeds = self.table["temperature"][:rows].float(), self.table["seed"][:rows]
        sharpness = self.drafter.rule.draft_sharpness
        propose = FixedProposals(heat, seeds, lens.long(), self.drafter.mixed_ids, noisy, sharpness)
        drafted = Levels([shape.depth], kinds=[])
        self.drafter.descend(propose, Frontier(self.pool, partial(self._view, lens)), h, drafted)
        copy_tree(
            self.buffers.tree(shape, rows),
            build_tree(roots, drafted.levels, shape.nodes, max_level=self.table["useful"][:rows]),
        )

    def _read(self, step: FirstStep, last: Tensor) -> Tensor:
        """h [B, H] of the roots; rows beyond a slot's count are written behind its committed ones, and overwritten."""
        rows, window = step.rows.shape
        lens, at = self.table["length"][:rows].int(), torch.arange(window, device=last.device)
        ctx = PagedContext(self.pool, [Block(self._view(lens, at.expand(rows, -1), None, window), window)])
        h = self.head.step(
            self.head.start(self.buffers.features[step.rows.flatten()]),
            self.head.embed(step.tokens.flatten().long(), self.drafter.target),
            (lens[:, None] + at).flatten().long(),
            ctx,
        )
        ctx.check_complete()
        return h.unflatten(0, (rows, window)).gather(1, last[..., None].expand(-1, -1, h.shape[-1]))[:, 0]

    def _view(self, lens: Tensor, levels: Tensor, mask: Tensor | None, queries: int) -> TreeView:
        pages = self.pool.table[self.table["slot"][: len(lens)], : self.width]
        return TreeView(pages, lens, levels.int(), mask, queries)


class FixedProposals:
    """`Proposals` for all slots at once, with parameters on the device: the head's likeliest tokens, or noisy ones.

    Args:
        temperatures: fp32 [B], 0 = greedy; seeds: int64 [B].
        roots: absolute position of each slot's root, int64 [B].
        mixed_ids: see Drafter.
        noisy: whether a slot's drafts take the noise; sharpness: of q beside it.
    """

    keeps_q = False

    def __init__(
        self, temperatures: Tensor, seeds: Tensor, roots: Tensor, mixed_ids: Tensor, noisy: bool, sharpness: float
    ):
        self.temperatures, self.seeds, self.roots = temperatures[:, None, None], seeds, roots
        self.mixed_ids, self.noisy, self.sharpness = mixed_ids, noisy, sharpness

    def __call__(self, logits: Tensor, level: int) -> Proposal:
        greedy = self.temperatures == 0
        log_q = (logits.float() / self.temperatures.where(~greedy, 1.0)).log_softmax(-1)
        if not self.noisy:
            return Proposal(log_q, None, log_q)
        noise = keyed_gumbel(self.seeds, Purpose.TARGET, self.roots + level, self.mixed_ids)
        keys = log_q.where(greedy, noisy_keys(log_q, noise[:, None], self.sharpness))
        edge = by_perturbed_law(keys, self.temperatures)
        return Proposal(keys, lambda best: best.where(greedy, edge(best)), log_q)
