"""How often drafts are accepted, learned from their edge scores while the engine runs. Knows scores and counts only."""

import bisect
import math
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

# levels 1, 2 and 3+ are counted apart: a head is surest of the first
GROUPS = 3
# bin centres, from unlikely to sure: even in the log of -score, so finest where most is accepted
CENTRES = [-0.01 * 1.7**i for i in range(14)][::-1]
_BOUNDS = [-((low * high) ** 0.5) for low, high in pairwise(CENTRES)]
# accepted drafts that a group's prior counts for, and those of a bin's (the prior is the group)
_GROUP_PRIOR, _BIN_PRIOR = 2.0, 6.0
# what a table keeps of the scores' own order where bins are pooled
_TILT = 0.02


class EdgeKind(Enum):
    """What an edge score is: the same number says something else in each kind, so each has its own calibration."""

    LOG_Q = "log-probability of a deterministic draft"
    SHARED = "log-probability to win the target's own draw"
    RANK = "constant by rank of a sampled draft"


class Calibration:
    """Log-probability that an offered child is accepted, by level group and raw edge score of one kind.

    Each bin holds the ratio of accepted children to those that their scores promised; ratios shrink to their group's,
    a group's to that of the level above, level 1's to 1 (the score itself). Between bin centres the table is linear
    and rises everywhere, so siblings keep their order.

    Args:
        memory: rounds after which what was counted weighs 1/e.
    """

    def __init__(self, memory: float = 128.0):
        self._keep = math.exp(-1 / memory)
        # (promised, accepted) x group x bin
        self._counts = np.zeros((2, GROUPS, len(CENTRES)))
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def observe(self, level: int, edges: Sequence[float], accepted: int) -> None:
        """Count the children of one visited node.

        Args:
            level: of the children, 1 below the root.
            edges: raw edge scores of those that were in the tree.
            accepted: index of the accepted one, or -1.
        """
        promised, taken = self._counts[:, _group(level)]
        bins = [bisect.bisect(_BOUNDS, edge) for edge in edges]
        for at, edge in zip(bins, edges, strict=True):
            promised[at] += math.exp(edge)
        if accepted >= 0:
            taken[bins[accepted]] += 1
        self._tables.clear()

    def forget(self) -> None:
        """Call once per round: what was counted fades, so that the table follows the text and a rare bin is retried."""
        self._counts *= self._keep
        self._tables.clear()

    def log_acceptance(self, edges: Tensor, level: int) -> Tensor:
        """Calibrated edge scores of children at `level` (any shape): <= 0, finite where `edges` are, else -inf."""
        knots, lines = self._table(edges.device)
        base, slope = lines[:, _group(level)]
        at = torch.bucketize(edges.contiguous(), knots)
        return torch.addcmul(base[at], slope[at], edges).clamp_(max=0)

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Knots [bins]; the lines between them and beyond as values at 0 and slopes [2, GROUPS, bins + 1]."""
        if device not in self._tables:
            lines, x, y = np.ones((2, GROUPS, len(CENTRES) + 1)), np.array(CENTRES), self._values()
            # beyond the outer centres the table runs parallel to the scores: -inf stays -inf, a finite one finite
            lines[1, :, 1:-1] = (y[:, 1:] - y[:, :-1]) / (x[1:] - x[:-1])
            lines[0, :, :-1] = y - lines[1, :, :-1] * x
            lines[0, :, -1] = y[:, -1] - x[-1]
            self._tables[device] = (
                torch.tensor(CENTRES, dtype=torch.float32, device=device),
                torch.from_numpy(lines).to(device, torch.float32),
            )
        return self._tables[device]

    def _values(self) -> np.ndarray:
        """Log of acceptance at the centres [GROUPS, bins], rising along them."""
        values, ratio = [], 1.0
        for promised, accepted in zip(*self._counts, strict=True):
            ratio = (accepted.sum() + _GROUP_PRIOR * ratio) / (promised.sum() + _GROUP_PRIOR)
            ratios = (accepted + _BIN_PRIOR * ratio) / (promised + _BIN_PRIOR)
            raw = np.minimum(CENTRES + np.log(ratios), 0)
            values.append((1 - _TILT) * rising(raw, promised + _BIN_PRIOR) + _TILT * np.array(CENTRES))
        return np.array(values)


def _group(level: int) -> int:
    return min(level, GROUPS) - 1


def rising(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The nearest rising sequence in weighted squares: falling neighbours are pooled."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        size = 1
        while pools and pools[-1][0] > value:
            above, heavy, count = pools.pop()
            value = (value * weight + above * heavy) / (weight + heavy)
            weight, size = weight + heavy, size + count
        pools.append((value, weight, size))
    return np.repeat([value for value, _, _ in pools], [size for _, _, size in pools])
