"""The definition of sample_nodes: `argmax(log p + G)`, p after temperature and filters, G keyed Gumbel noise."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3_kernels.sample_nodes.filters import Filters, check_finite, survivors, tempered
from eagle3_kernels.sample_nodes.noise import Purpose, gumbel, vocabulary_gumbel


def greedy_nodes(logits: Tensor) -> Tensor:
    """The largest logit's token per row of [R, V], lowest id at ties, int64 [R].

    Raises:
        FloatingPointError: a row whose largest logit is not finite.
    """
    # max is several times faster than argmax in bfloat16 on CPU, and propagates NaN
    best, token = logits.max(-1)
    check_finite(best, logits.dtype)
    return token


def sample_nodes(logits: Tensor, filters: Sequence[Filters], seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """The target's token per row of logits [R, V], int64 [R].

    Args:
        filters: of each row.
        seeds: each row's request seed (see request_seed).
        positions: absolute position of the token that each row draws.
    """
    rows = zip(logits, filters, seeds, positions, strict=True)
    return torch.tensor([sample_node(*row) for row in rows], dtype=torch.int64, device=logits.device)


def sample_node(logits: Tensor, filters: Filters, seed: int, position: int) -> int:
    """One row of sample_nodes, logits [V]."""
    if filters.temperature == 0:
        return int(greedy_nodes(logits[None]))
    ids, scores = perturbed_scores(logits, filters, seed, position)
    # ids ascend, and argmax takes the first of equal values
    best = scores.argmax()
    return int(best if ids is None else ids[best])


def perturbed_scores(logits: Tensor, filters: Filters, seed: int, position: int) -> tuple[Tensor | None, Tensor]:
    """What the draw maximises: ids that the filters keep (None = all), and their scores plus noise, fp32.

    Raises:
        FloatingPointError: the largest logit is not finite.
    """
    scores = tempered(logits, filters.temperature)
    if filters.temperature == 0:
        return None, scores
    ids = survivors(scores, filters)
    if ids is None:
        return None, scores.add_(vocabulary_gumbel(seed, Purpose.TARGET, position, len(scores), scores.device))
    return ids, scores[ids].add_(gumbel(seed, Purpose.TARGET, position, ids))
