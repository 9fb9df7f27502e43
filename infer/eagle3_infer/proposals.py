"""How a node's children are proposed: ranking keys and edge scores out of the head's logits.

Deterministic drafts are the head's likeliest tokens. With shared noise they are the likeliest winners of the target's
own draw; for the rejection rule they are sampled, without replacement, from the head's law.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eagle3_infer.calibration import EdgeKind
from eagle3_infer.config import REJECTION, SHARED_NOISE, RuleConfig
from eagle3_infer.sampling import Sampler
from eagle3_kernels.sample_nodes import Filters, Purpose, draft_log_probs, mixed_gumbel

# Shared noise: with p the target's law, the draw is argmax(log q + G + e), e = log p - log q. Were the errors e
# independent Gumbel noise of scale s, a token's chance to win would be exactly softmax((log q + G) / s): that is the
# edge score. Logits are off by what the head misses, so at temperature T by 1/T of it: s = DRAFT_ERROR / T. Maximum
# likelihood on the shipped head's own runs gives s = 1.0 at T = 1 and 1.4 at T = 0.7, on every level alike
DRAFT_ERROR = 1.0
# Sampled drafts: what the j-th child is accepted with after j - 1 rejections, to first order the same for every token.
# An edge score that looked at the sampled token would prune by it, and bias the output (tests/oracles/test_rules.py)
SAMPLED_ACCEPTANCE = 0.6

Edge = Callable[[Tensor], Tensor]


def edge_kind(rule: RuleConfig, sampler: Sampler) -> EdgeKind:
    """What the edge scores of a request's drafts are."""
    if sampler.greedy:
        return EdgeKind.LOG_Q
    if rule.rule == REJECTION:
        return EdgeKind.RANK
    return EdgeKind.SHARED if rule.draft_noise == SHARED_NOISE else EdgeKind.LOG_Q


class Proposal(NamedTuple):
    """A level's children as proposed.

    Args:
        keys: what ranks them [B, M, Vd].
        edge: keys of the best [B, M, k] -> their edge scores; None = the keys are edge scores.
        log_q: the law that drew them [B, M, Vd].
    """

    keys: Tensor
    edge: Edge | None
    log_q: Tensor


class Propose(Protocol):
    """Makes proposals of a head's logits [B, M, Vd] for a level of children, from 1."""

    @property
    def keeps_q(self) -> bool:
        """Whether the rule will ask for the laws that drew the children."""
        ...

    def __call__(self, logits: Tensor, level: int) -> Proposal: ...


class Proposals:
    """Proposes children for the slots of one round.

    Args:
        samplers: of each slot.
        roots: absolute position of each slot's root.
        mixed_ids: of the target id of every draft id [Vd], as the noise's hash takes them.
    Attributes:
        sampled: slots that do not decode greedily; kinds: what each slot's edge scores are.
        keeps_q: whether a rule will ask for the laws that drew the children.
    """

    def __init__(self, rule: RuleConfig, samplers: Sequence[Sampler], roots: Sequence[int], mixed_ids: Tensor):
        self.rule, self.samplers, self.roots, self.mixed_ids = rule, samplers, roots, mixed_ids
        self.sampled = [slot for slot, sampler in enumerate(samplers) if not sampler.greedy]
        self.kinds = [edge_kind(rule, sampler) for sampler in samplers]
        temperatures = [sampler.filters.temperature for sampler in samplers]
        self._temperatures = torch.tensor(temperatures, device=mixed_ids.device)[:, None, None]
        self.keeps_q = rule.rule == REJECTION and bool(self.sampled)

    def __call__(self, logits: Tensor, level: int) -> Proposal:
        """Propose the children of a level's frontier.

        Args:
            logits: the head's [B, M, Vd].
            level: of the children, from 1.
        """
        log_q = self._log_q(logits.float())
        noisy = self.rule.rule == REJECTION or self.rule.draft_noise == SHARED_NOISE
        if not (noisy and self.sampled):
            return Proposal(log_q, None, log_q)
        purpose = Purpose.DRAFT if self.rule.rule == REJECTION else Purpose.TARGET
        sharpness = 1.0 if purpose == Purpose.DRAFT else self.rule.draft_sharpness
        keys = log_q.clone()
        for slot in self.sampled:
            noise = mixed_gumbel(self.samplers[slot].seed, purpose, self.roots[slot] + level, self.mixed_ids)
            keys[slot] = noisy_keys(log_q[slot], noise, sharpness)
        edge = _by_rank if purpose == Purpose.DRAFT else by_perturbed_law(keys, self._temperatures)
        if len(self.sampled) == len(self.samplers):
            return Proposal(keys, edge, log_q)
        greedy = self._temperatures == 0
        return Proposal(keys, lambda best: torch.where(greedy, best, edge(best)), log_q)

    def _log_q(self, logits: Tensor) -> Tensor:
        filters = [self._filters(sampler) for sampler in self.samplers]
        if len(set(filters)) == 1:
            return draft_log_probs(logits, filters[0])
        return torch.stack([draft_log_probs(rows, each) for rows, each in zip(logits, filters, strict=True)])

    def _filters(self, sampler: Sampler) -> Filters:
        """Noisy drafts follow the target's filters; deterministic ones are cut by the tree's size alone."""
        if self.rule.rule == REJECTION or self.rule.draft_noise == SHARED_NOISE:
            return sampler.filters
        return Filters(sampler.filters.temperature)


def noisy_keys(log_q: Tensor, noise: Tensor, sharpness: float) -> Tensor:
    """What ranks drafts under Gumbel noise G: sharpness * log q + G.

    With shared noise any ranking keeps the output: the walk goes to the target's own draw, or stops. The rejection rule
    supposes drafts of q itself: sharpness 1.
    """
    return sharpness * log_q + noise


def _by_rank(best: Tensor) -> Tensor:
    """log(a (1 - a)^j) for child j of each node, whatever it is.

    Where the filtered law has fewer tokens than children, the others keep their places and are skipped by the rule
    (q = 0). Were the places given to other nodes, the shape would look at the sampled tokens, and bias the output.
    """
    ranks = torch.arange(best.shape[-1], device=best.device)
    scores = math.log(SAMPLED_ACCEPTANCE) + ranks * math.log(1 - SAMPLED_ACCEPTANCE)
    # a head that is not finite must be seen
    return torch.where(best.isnan(), best, scores)


def by_perturbed_law(keys: Tensor, temperature: Tensor) -> Edge:
    """log softmax(keys / s) of each node's children, s by slot."""
    sharpness = temperature / DRAFT_ERROR
    normaliser = torch.logsumexp(keys * sharpness, -1, keepdim=True)
    return lambda best: (best * sharpness - normaliser).clamp(max=0)
