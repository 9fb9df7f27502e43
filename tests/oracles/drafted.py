"""Drafted levels for the tests of trees, grown as the engine grows them."""

import torch
from torch import Tensor

from eagle3_kernels.expand_level import expand_level
from eagle3_kernels.structures import Level


def draw_log_q(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Log-probabilities of a draft: random, tied in whole groups, or saturated (0 and -inf)."""
    logits = torch.randn(shape, generator=generator) * 3
    if kind == "tied":
        return (logits.round() - 10).clamp(max=0)
    if kind == "saturated":
        best = logits.argmax(-1, keepdim=True)
        return torch.full(shape, -torch.inf).scatter(-1, best, 0.0)
    if kind == "all zero":
        return torch.zeros(shape)
    return logits.log_softmax(-1)


def draw_levels(kind: str, slots: int, depth: int, top_k: int, vocab: int, seed: int) -> list[Level]:
    generator = torch.Generator().manual_seed(seed)
    scores, levels = torch.zeros(slots, 1), []
    for _ in range(depth):
        level = expand_level(draw_log_q(kind, (slots, scores.shape[1], vocab), generator), scores, top_k)
        scores = level.frontier_scores
        levels.append(level)
    return levels
