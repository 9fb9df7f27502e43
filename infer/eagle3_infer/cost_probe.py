"""What forwards cost on this device: the target's by rows, the head's first step and one more draft level.

Runs both models on a scratch pool, so that nothing of a run's is touched.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eagle3_infer.costs import CostModel, measure
from eagle3_infer.drafter import Drafter
from eagle3_infer.kv import Block, KVPool, PagedContext, PoolLayout
from eagle3_infer.metrics import now
from eagle3_kernels.expand_level import expand_level

# committed rows that the measured forwards attend to
CONTEXT = 128
# rows of the largest forward that is measured; beyond, cost grows as it did up to there
MOST_MEASURED = 512


@torch.inference_mode()
def measure_costs(drafter: Drafter, layouts: Sequence[PoolLayout], slots: int, most_rows: int) -> CostModel:
    """Time forwards of 1, 2, 4, ... rows, up to what trees bring.

    Args:
        slots: sequences that draft at once.
        most_rows: rows that a forward may have.
    """
    most_rows = min(most_rows, MOST_MEASURED)
    probe, device = _Probe(drafter, layouts, most_rows), drafter.target.device

    def timed(run: Callable[[int], Tensor], most: int) -> dict[int, float]:
        rows = [1 << i for i in range(max(1, min(most, most_rows)).bit_length())]
        return measure(run, rows, clock=lambda: now(device))

    return CostModel(
        verify=timed(probe.verify, most_rows),
        # a backlog is read in pieces of so many rows
        first=timed(probe.first, drafter.most_rows),
        level=timed(probe.level, slots * drafter.tree.top_k),
    )


class _Probe:
    """Forwards of any number of rows after CONTEXT committed ones."""

    def __init__(self, drafter: Drafter, layouts: Sequence[PoolLayout], most_rows: int):
        self.drafter, self.target, self.head = drafter, drafter.target, drafter.head
        length = CONTEXT + most_rows
        self.pools = [KVPool(x.shapes, 1, 1, length, x.dtype, self.target.device) for x in layouts]
        for pool in self.pools:
            pool.assign(0, length)

    def verify(self, rows: int) -> Tensor:
        ids, positions, ctx = self._inputs(0, rows, rows)
        return self.target.logits(self.target.hidden(ids, positions, ctx))

    def first(self, rows: int) -> Tensor:
        """Read `rows` committed rows and propose children of the last."""
        ids, positions, ctx = self._inputs(1, rows, 1)
        features = torch.zeros(rows, self.head.feature_size, dtype=self.target.dtype, device=ids.device)
        h = self.head.start(features)
        last = torch.tensor([rows - 1], device=ids.device)
        return self._propose(self.head.step(h, self.head.embed(ids, self.target), positions, ctx, query_rows=last))

    def level(self, rows: int) -> Tensor:
        """Run a frontier of `rows` nodes and propose their children."""
        ids, positions, ctx = self._inputs(1, rows, rows)
        embeds = self.head.embed(ids, self.target)
        return self._propose(self.head.step(torch.zeros_like(embeds), embeds, positions, ctx))

    def _propose(self, h: Tensor) -> Tensor:
        log_q = self.head.logits(h[None]).float().log_softmax(-1)
        scores = torch.zeros(log_q.shape[:2], device=log_q.device)
        return expand_level(log_q, scores, self.drafter.tree.top_k).scores

    def _inputs(self, model: int, rows: int, queries: int) -> tuple[Tensor, Tensor, PagedContext]:
        row = torch.arange(rows, device=self.target.device)
        view = self.pools[model].view([0], [CONTEXT], row[None], queries=queries)
        positions = (row + CONTEXT).clamp(max=self.target.max_positions - 1)
        return torch.zeros_like(row), positions, PagedContext(self.pools[model], [Block(view, rows)])
