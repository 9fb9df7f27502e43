"""The optimiser and its schedule: a learning rate is a function of the step, so resuming needs no state of it."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from eagle3.errors import Eagle3Error
from eagle3_train.config import OptimConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW on fp32 weights; weight decay touches matrices only."""
    trainable = [p for p in parameters if p.requires_grad]
    assert all(p.dtype == torch.float32 for p in trainable), "trainable weights must be fp32"
    groups = [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))


def learning_rate(step: int, max_steps: int, config: OptimConfig) -> float:
    """Linear warm-up, then cosine to `final_ratio` of the peak at the last step (step counts from 0)."""
    warmup = max(1, round(config.warmup_ratio * max_steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = min(1.0, (step + 1 - warmup) / max(1, max_steps - warmup))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_ratio + (1 - config.final_ratio) * cosine)


def check_finite(grad_norm: Tensor | float | None, step: int) -> None:
    """Stop before a step that would spoil the weights (None: the framework measures no norm).

    Raises:
        Eagle3Error: the gradients of `step` are not finite.
    """
    if grad_norm is not None and not math.isfinite(grad_norm):
        raise Eagle3Error(
            f"step {step}: the gradients are not finite; lower optim.lr, or set autocast: float32 "
            "(the last checkpoint and best/ are as they were)"
        )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
