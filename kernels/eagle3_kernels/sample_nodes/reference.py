"""The definition of sample_nodes: `argmax(log p + G)`, p after temperature and filters, G keyed Gumbel noise."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3_kernels.sample_nodes.filters import Filters, check_tokens, survivors, tempered
from eagle3_kernels.sample_nodes.noise import Purpose, gumbel, vocabulary_gumbel


def greedy_nodes(logits: Tensor) -> Tensor:
    """The largest logit's token per row of [R, V], lowest id at ties, int64 [R]; -1 where the largest is not finite."""
    # max is several times faster than argmax in bfloat16 on CPU, and propagates NaN
    best, token = logits.max(-1)
    return token.where(best.isfinite(), -1)


def sample_rows(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, min_p: Tensor | None = None
) -> Tensor:
    """`sample_nodes` with the parameters on the device, int64 [R]: nothing but the tokens has to be waited for.

    Args:
        logits: [R, V].
        temperature: [R]; 0 = argmax.
        seeds, positions: int64 [R], as in sample_nodes.
        min_p: [R], 0 = off; None = off in every row. Rows with top-k or top-p have no such form.
    Returns:
        -1 for a row whose largest logit is not finite: see check_tokens.
    """
    off = torch.zeros_like(temperature) if min_p is None else min_p
    drawn = [
        _marked(row, Filters(heat, min_p=share), seed, position)
        for row, heat, share, seed, position in zip(
            logits, temperature.tolist(), off.tolist(), seeds.tolist(), positions.tolist(), strict=True
        )
    ]
    return torch.tensor(drawn, dtype=torch.int64, device=logits.device)


def _marked(logits: Tensor, filters: Filters, seed: int, position: int) -> int:
    try:
        return sample_node(logits, filters, seed, position)
    except FloatingPointError:
        return -1


def sample_nodes(logits: Tensor, filters: Sequence[Filters], seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """The target's token per row of logits [R, V], int64 [R].

    Args:
        filters: of each row.
        seeds: each row's request seed (see request_seed).
        positions: absolute position of the token that each row draws.
    Raises:
        FloatingPointError: a row whose largest logit is not finite.
    """
    rows = zip(logits, filters, seeds, positions, strict=True)
    return torch.tensor([sample_node(*row) for row in rows], dtype=torch.int64, device=logits.device)


def sample_node(logits: Tensor, filters: Filters, seed: int, position: int) -> int:
    """One row of sample_nodes, logits [V]."""
    if filters.temperature == 0:
        token = int(greedy_nodes(logits[None]))
        check_tokens([token], logits.dtype)
        return token
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
