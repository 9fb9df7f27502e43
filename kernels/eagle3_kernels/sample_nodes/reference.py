"""The definition of sample_nodes: `argmax(log p + G)`, p after temperature, top-k and top-p, G keyed Gumbel noise.

The noise is a counter-based 32-bit hash: the same integers wherever it is computed, and independent of slot,
batch, tree and head. Integers are uint32 held in int64.
"""

import math
from enum import IntEnum
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

Uint32 = TypeVar("Uint32", int, Tensor)
_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
# the largest float32 below 1
_BELOW_ONE = 1 - 2**-24


class Purpose(IntEnum):
    """What a random number is for; numbers of different purposes are independent."""

    TARGET = 1
    ACCEPT = 2
    RESIDUAL = 3
    DRAFT = 4


def mix(x: Uint32) -> Uint32:
    """A bijection of 32-bit integers with near-ideal avalanche (C. Wellons' `lowbias32`)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def hash_words(*words: int) -> int:
    """One 32-bit hash of integers of any size and sign, order mattering."""
    state = _GOLDEN
    for word in words:
        for half in (word & _MASK, (word >> 32) & _MASK):
            state = mix(((state ^ mix(half)) + _GOLDEN) & _MASK)
    return state


def request_seed(run_seed: int, prompt: int, turn: int = 0, sample: int = 0) -> int:
    """The 32-bit seed of one request of a run: never the slot it happens to run in."""
    return hash_words(run_seed, prompt, turn, sample)


def noise_integers(seed: int, purpose: Purpose, position: int, ids: Tensor) -> Tensor:
    """Uniform uint32 (as int64) for each id: `mix(hash(seed, purpose, position) ^ mix(id))`."""
    return mix(hash_words(seed, purpose, position) ^ mix(ids))


def gumbel(seed: int, purpose: Purpose, position: int, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, for each id (token or sibling index) at an absolute position.

    G = -log(-log(1 - u)), u = (h + 0.5) / 2^32 clamped below 1. u and 1 - u have one law; this side of it keeps
    float32's full precision where argmax looks, at large G.
    """
    return to_gumbel(noise_integers(seed, purpose, position, ids))


def to_gumbel(integers: Tensor) -> Tensor:
    """Gumbel noise of uniform 32-bit integers."""
    uniform = integers.float().add_(0.5).mul_(2**-32).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def greedy_nodes(logits: Tensor) -> Tensor:
    """The largest logit's token per row of [R, V], lowest id at ties, int64 [R].

    Raises:
        FloatingPointError: a row whose largest logit is not finite.
    """
    # max is several times faster than argmax in bfloat16 on CPU, and propagates NaN
    best, token = logits.max(-1)
    if not torch.isfinite(best).all():
        raise FloatingPointError(_not_finite(logits))
    return token


def sample_nodes(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    """The target's token per row of logits [R, V], int64 [R]; parameters and keys are [R].

    Args:
        temperature: 0 = plain argmax.
        top_k: 0 = off. top_p: 1 = off.
        seed: request seeds (see request_seed).
        position: absolute position of the token that is drawn.
    """
    rows = zip(*(x.tolist() for x in (temperature, top_k, top_p, seed, position)), strict=True)
    return torch.tensor([sample_node(logits[r], *row) for r, row in enumerate(rows)], device=logits.device)


def sample_node(logits: Tensor, temperature: float, top_k: int, top_p: float, seed: int, position: int) -> int:
    """One row of sample_nodes, logits [V]."""
    if temperature == 0:
        return int(greedy_nodes(logits[None]))
    ids, scores = perturbed_scores(logits, temperature, top_k, top_p, seed, position)
    # ids ascend, and argmax takes the first of equal values
    best = scores.argmax()
    return int(best if ids is None else ids[best])


def perturbed_scores(
    logits: Tensor, temperature: float, top_k: int, top_p: float, seed: int, position: int
) -> tuple[Tensor | None, Tensor]:
    """What the draw maximises: ids that the filters keep (None = all), and their scores plus noise, fp32."""
    scores = logits.float() / (temperature or 1.0)
    if not math.isfinite(scores.max().item()):
        raise FloatingPointError(_not_finite(logits))
    if temperature == 0:
        return None, scores
    ids = survivors(scores, top_k, top_p)
    if ids is None:
        return None, scores + _vocabulary_gumbel(seed, position, len(scores), scores.device)
    return ids, scores[ids] + gumbel(seed, Purpose.TARGET, position, ids)


def survivors(scores: Tensor, top_k: int, top_p: float) -> Tensor | None:
    """Ascending ids that top-k, then top-p keep (transformers' rules), or None for all. scores [V] fp32."""
    ids = None
    if top_k:
        kept = scores >= scores.topk(min(top_k, len(scores))).values[-1]
        ids = kept.nonzero().squeeze(1)
        scores = scores[ids]
    if top_p < 1:
        nucleus = _nucleus(scores, top_p)
        ids = nucleus if ids is None else ids[nucleus]
    return ids


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Ascending indices of the most likely entries: those that, with all below them, hold more than 1 - top_p."""
    mass = scores.softmax(0)
    total = mass.sum(dtype=torch.float64)
    # sorting a whole vocabulary costs more than a decoding step should: look at more only while needed
    size = min(256, len(scores))
    while True:
        best, index = torch.sort(mass, descending=True, stable=True) if size == len(mass) else mass.topk(size)
        best = best.double()
        keep = total - (best.cumsum(0) - best) > 1 - top_p
        keep[0] = True
        if size == len(mass) or not keep[-1]:
            return index[keep].sort().values
        size = min(8 * size, len(mass))


def _vocabulary_gumbel(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    return to_gumbel(mix(hash_words(seed, Purpose.TARGET, position) ^ _mixed_vocabulary(vocab_size, device)))


@lru_cache(maxsize=4)
def _mixed_vocabulary(vocab_size: int, device: torch.device) -> Tensor:
    return mix(torch.arange(vocab_size, device=device))


def _not_finite(logits: Tensor) -> str:
    return (
        f"the target's logits are not finite in {str(logits.dtype).removeprefix('torch.')}; "
        "try bfloat16 or float32 (float16 overflows in some models)"
    )
