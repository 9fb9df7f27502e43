"""An exponential moving average of the weights in training. Knows tensors by name, no frameworks."""

from collections.abc import Mapping

import torch
from torch import Tensor


class EMA:
    """Averages, fp32, of what this process holds of the weights: all of each, or its shard.

    Args:
        weights: the tensors that are trained, by name.
        decay: of the average, per step; 0 = no average, `averages` is None.
        averages: those of a run that goes on; None: it starts at the weights.
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float, averages: Mapping[str, Tensor] | None = None):
        self.decay = decay
        start = weights if averages is None else averages
        self.averages = {name: weight.detach().clone() for name, weight in start.items()} if decay else None

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Count in the weights after `step` steps; early ones count more, lest the start stay in the average."""
        if self.averages is not None:
            decay = min(self.decay, (1 + step) / (10 + step))
            for name, weight in weights.items():
                self.averages[name].lerp_(weight, 1 - decay)
