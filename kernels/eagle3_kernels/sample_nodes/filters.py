"""Temperature, top-k, top-p and min-p: which tokens a request may draw, and with which probabilities.

transformers' rules in its order, each over what the one before kept. Where tokens tie at the edge of top-p, whose
sort leaves open which of them stay, the lowest ids do.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Filters(NamedTuple):
    """How a request draws: temperature (0 = argmax, and no filter counts), top_k (0 = off), top_p (1 = off),
    min_p (0 = off).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def keep_all(self) -> bool:
        """Whether every token may be drawn."""
        return not self.top_k and self.top_p >= 1 and not self.min_p


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Logits [V] divided by the temperature (not at 0), a new fp32 tensor.

    Raises:
        FloatingPointError: the largest logit is not finite.
    """
    scores = logits.float() / (temperature or 1.0)
    check_finite(scores.max(), logits.dtype)
    return scores


def check_finite(largest: Tensor, dtype: torch.dtype) -> None:
    """Raises FloatingPointError where a row's largest logit is not finite; a NaN is its row's largest."""
    if not largest.isfinite().all():
        raise _not_finite(dtype)


def check_tokens(tokens: Iterable[int], dtype: torch.dtype) -> None:
    """Raises FloatingPointError where a token is -1: an op that does not wait for the device marks bad logits so.

    Args:
        dtype: of the logits.
    """
    if any(token < 0 for token in tokens):
        raise _not_finite(dtype)


def _not_finite(dtype: torch.dtype) -> FloatingPointError:
    return FloatingPointError(
        f"the target's logits are not finite in {str(dtype).removeprefix('torch.')}; "
        "try bfloat16 or float32 (float16 overflows in some models)"
    )


def target_probs(logits: Tensor, filters: Filters, dtype: torch.dtype = torch.float32) -> Tensor:
    """p [V] after temperature and filters, zero where filtered; at temperature 0 all of it on the lowest argmax.

    Raises:
        FloatingPointError: the largest logit is not finite.
    """
    scores = tempered(logits, filters.temperature)
    ids = scores.argmax()[None] if filters.temperature == 0 else survivors(scores, filters)
    if ids is None:
        return scores.softmax(0, dtype=dtype)
    return torch.zeros_like(scores, dtype=dtype).index_copy_(0, ids, scores[ids].softmax(0, dtype=dtype))


def survivors(scores: Tensor, filters: Filters) -> Tensor | None:
    """Ascending ids that the filters keep of tempered scores [V] fp32, or None for all."""
    ids = None
    if filters.top_k:
        kept = scores >= scores.topk(min(filters.top_k, len(scores))).values[-1]
        ids = kept.nonzero().squeeze(1)
        scores = scores[ids]
    for keep, bound, off in ((_nucleus, filters.top_p, 1), (_likely_enough, filters.min_p, 0)):
        if bound != off:
            kept = keep(scores, bound)
            ids = kept if ids is None else ids[kept]
            scores = scores[kept]
    return ids


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Ascending indices of the most likely entries: those that, with all below them, hold more than 1 - top_p."""
    mass = scores.softmax(0)
    total = mass.sum(dtype=torch.float64)
    # sorting a whole vocabulary costs more than a decoding step should: look at more only while needed
    size = min(256, len(scores))
    while True:
        best, index = torch.sort(scores, descending=True, stable=True) if size == len(scores) else scores.topk(size)
        share = mass[index].double()
        keep = total - (share.cumsum(0) - share) > 1 - top_p
        keep[0] = True
        if size == len(scores) or not keep[-1]:
            break
        size = min(8 * size, len(scores))
    count = int(keep.sum())
    if count < size and best[count] == best[count - 1]:
        # topk orders equals as it likes
        sure, tied = (scores > best[count]).nonzero(), (scores == best[count]).nonzero()
        index = torch.cat([sure, tied]).squeeze(1)
    return index[:count].sort().values


def _likely_enough(scores: Tensor, min_p: float) -> Tensor:
    """Ascending indices of the entries at least min_p times as likely as the likeliest."""
    mass = scores.softmax(0)
    return (mass >= min_p * mass.max()).nonzero().squeeze(1)


def draft_log_probs(logits: Tensor, filters: Filters) -> Tensor:
    """log q [..., V] fp32 of a draft's logits after the same temperature and filters, -inf where filtered.

    A draft needs no filter's exact edge: all that tie there are kept. At temperature 0 the plain log-softmax.
    """
    log_q = (logits.float() / (filters.temperature or 1.0)).log_softmax(-1)
    if filters.temperature == 0 or filters.keep_all:
        return log_q
    if filters.top_k:
        log_q = _cut(log_q, log_q.topk(min(filters.top_k, log_q.shape[-1])).values[..., -1:])
    if filters.top_p < 1:
        log_q = _cut(log_q, _nucleus_edge(log_q, filters.top_p))
    if filters.min_p:
        log_q = _cut(log_q, log_q.amax(-1, keepdim=True) + math.log(filters.min_p))
    return log_q


def _cut(log_q: Tensor, edge: Tensor) -> Tensor:
    """log q of what is not below `edge` [..., 1]."""
    return log_q.masked_fill_(log_q < edge, -torch.inf).log_softmax(-1)


def _nucleus_edge(log_q: Tensor, top_p: float) -> Tensor:
    """The smallest log q [..., 1] that top-p keeps in each row."""
    size = min(256, log_q.shape[-1])
    while True:
        best = log_q.topk(size).values
        share = best.exp()
        keep = 1 - (share.cumsum(-1) - share) > 1 - top_p
        if size == log_q.shape[-1] or not keep[..., -1].any():
            return best.gather(-1, keep.sum(-1, keepdim=True).clamp(min=1) - 1)
        size = min(8 * size, log_q.shape[-1])
