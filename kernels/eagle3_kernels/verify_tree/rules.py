"""Rejection rules of one tree node: which child is accepted, and what is emitted where none is. Pure functions.

They keep the target's law only if whether a child is offered does not look at that child's own draw: a tree of sampled
drafts has a shape that its tokens and their scores do not decide, and siblings are tried in the order they were drawn.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TARGET_ONLY, REJECTION, THRESHOLD = "target_only", "rejection", "threshold"


class NodeLaw(NamedTuple):
    """What a rule does at one node.

    Args:
        accept: probability that each child is accepted, given that it is tried (all before it were rejected) [c].
        residual: law of the token that is emitted when all are rejected [V].
        children: token ids of the children, in the order they are tried.
    """

    accept: Tensor
    residual: Tensor
    children: Sequence[int]


def sequential_law(p: Tensor, children: Sequence[int], q: Tensor | None = None) -> NodeLaw:
    """Try children one after the other so that the emitted token follows p.

    With q, for drafts sampled from it without replacement in this order (recursive rejection, RSD, arXiv 2402.14160,
    section 3; on one child Leviathan's rule): child x_i is accepted with min(1, p_i(x_i) / q_i(x_i)), then
    p_{i+1} = norm((p_i - q_i)+) and q_{i+1} is q_i without x_i, renormalised.
    Without q, for drafts that are no draws (target-only): the same with q_i all on x_i, so p_i(x_i), and p_{i+1} is
    p_i without x_i, renormalised. A child that cannot be drawn (q_i = 0, as one tried before) is skipped.

    Args:
        p, q: probabilities [V], float32 or float64.
    """
    p, accept = _normalised(p), p.new_zeros(len(children))
    q = None if q is None else _normalised(q)
    for i, x in enumerate(children):
        if q is not None and q[x] == 0:
            continue
        left = _without(p, x) if q is None else (p - q).clamp_(min=0)
        mass = left.sum()
        if mass == 0:
            # p is q: no draw is rejected. The residual, of probability 0, stays p and finite
            accept[i] = 1
            break
        accept[i] = p[x] if q is None else (p[x] / q[x]).clamp(max=1)
        p = left.div_(mass)
        q = None if q is None else _normalised(_without(q, x))
    return NodeLaw(accept, p, children)


def _normalised(law: Tensor) -> Tensor:
    """Mass 1, or an empty law as it is."""
    mass = law.sum()
    return law / mass if mass > 0 else law


def _without(law: Tensor, x: int) -> Tensor:
    """A copy with no mass at x."""
    left = law.clone()
    left[x] = 0
    return left


def decide(law: NodeLaw, coins: Tensor, noise: Tensor) -> tuple[int, int]:
    """(index of the accepted child or -1, its token or the one emitted instead).

    Args:
        coins: uniform in [0, 1), one per child [c].
        noise: Gumbel noise per token [V], independent of the coins; equal scores go to the lowest id.
    """
    hits = (coins < law.accept).nonzero()
    if len(hits):
        first = int(hits[0])
        return first, law.children[first]
    return -1, int((law.residual.log() + noise).argmax())


def threshold_choice(p: Tensor, children: Sequence[int], threshold: float) -> int:
    """Index of the most likely child (the first of equals) if p of it reaches the threshold, else -1. LOSSY.

    Args:
        p: probabilities [V].
    """
    if not children:
        return -1
    best = int(p[torch.as_tensor(children, device=p.device)].argmax())
    return best if p[children[best]] >= threshold else -1
