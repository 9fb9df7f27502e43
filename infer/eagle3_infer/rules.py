"""What a round accepts: at each visited node the request's rule compares the target's law with the node's children."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3_infer.config import REJECTION, THRESHOLD, RuleConfig
from eagle3_infer.drafter import Draft
from eagle3_infer.running import Running
from eagle3_infer.sampling import Sampler, log_prob
from eagle3_kernels.dispatch import uses_triton
from eagle3_kernels.sample_nodes import Filters, Purpose, greedy_nodes, target_probs, uniforms, vocabulary_gumbel
from eagle3_kernels.structures import Walk
from eagle3_kernels.verify_tree import match, verify_sampled, verify_tree
from eagle3_kernels.verify_tree.rules import decide, sequential_law, threshold_choice


class RoundRule:
    """The Decide of one round, for verify_tree; processors and noise are spent on visited nodes only.

    Args:
        logits: a row per tree row in use [T, V]; starts: first row of each running sequence.
    Attributes:
        logprobs: of the tokens that the walk emits, per sequence, where they are wanted.
    """

    def __init__(
        self, rule: RuleConfig, logits: Tensor, starts: Sequence[int], draft: Draft, running: Sequence[Running]
    ):
        self.rule, self.logits, self.starts, self.draft, self.running = rule, logits, starts, draft, running
        self.samplers: list[Sampler] = [sequence.sampler for sequence in running]
        self.logprobs: list[list[float]] = [[] for _ in running]
        matched = rule.rule != THRESHOLD and any(sampler.greedy for sampler in self.samplers)
        self._best = greedy_nodes(logits) if matched else None
        self._best_tokens: list[int] | None = None
        self._prefixes: dict[int, list[int]] = {}

    def walk(self) -> Walk:
        """The path that is accepted of each sequence's tree; a bonus of -1 tells of logits that are not finite."""
        greedy = self.tokens()
        if greedy is None and self._without_host():
            return self._walk_on_device()
        return verify_tree(self.draft.tree, self if greedy is None else greedy)

    def _without_host(self) -> bool:
        """Whether a kernel can walk by this rule: node by node the host would wait for the device each time."""
        simple = all(s.fusable and not s.filters.min_p for s in self.samplers)
        # bare roots were drawn from no law
        known = self.rule.rule != REJECTION or self.draft.log_q is not None
        return bool(self.running) and not self.rule.pathwise and simple and known and uses_triton(self.logits)

    def _walk_on_device(self) -> Walk:
        tree, rule, device = self.draft.tree, self.rule.rule, self.logits.device
        greedy = torch.tensor([sampler.greedy for sampler in self.samplers], device=device)
        heat = torch.tensor([sampler.filters.temperature or 1.0 for sampler in self.samplers], device=device)
        p = (self.logits[self._rows()].float() / heat[:, None, None]).softmax(-1)
        if rule != THRESHOLD:
            one_hot = torch.zeros_like(p).scatter_(-1, p.argmax(-1, keepdim=True), 1.0)
            p = torch.where(greedy[:, None, None] & p.isfinite(), one_hot, p)
        return verify_sampled(
            tree,
            p,
            seeds=torch.tensor([sampler.seed for sampler in self.samplers], device=device),
            positions=torch.tensor([sequence.length for sequence in self.running], device=device),
            rule=rule,
            q=None if self.draft.log_q is None else self.draft.log_q.exp(),
            target_ids=self.draft.target_ids,
            threshold=self.rule.threshold,
            greedy=greedy,
        )

    def _rows(self) -> Tensor:
        """Rows of the logits [B, N] of each tree's rows; those that a tree does not use are never visited."""
        starts = torch.tensor(self.starts[: len(self.running)], dtype=torch.int64, device=self.logits.device)
        rows = starts[:, None] + torch.arange(self.draft.tree.tokens.shape[1], device=starts.device)
        return rows.clamp(max=len(self.logits) - 1)

    def tokens(self) -> Tensor | None:
        """The target's token after every tree row [B, N] if all requests are plainly greedy, else None."""
        if self._best is None or not all(sampler.plain_greedy for sampler in self.samplers):
            return None
        return self._best[self._rows()]

    def __call__(self, slot: int, row: int, level: int, children: list[int]) -> tuple[int, int]:
        """Index of the accepted child or -1, and the token that is emitted at this node."""
        sampler, at = self.samplers[slot], self.starts[slot] + row
        # the token after a row stands one position further
        which, token = self._decide(slot, row, at, self.running[slot].length + level + 1, children)
        if sampler.logprobs:
            self.logprobs[slot].append(log_prob(self.logits[at], token))
        if sampler.processors:
            self._prefix(slot).append(token)
        return which, token

    def _decide(self, slot: int, row: int, at: int, position: int, children: list[int]) -> tuple[int, int]:
        sampler, rule = self.samplers[slot], self.rule.rule
        forced = sampler.forced_token(position)
        if forced is not None:
            return match(forced, children)
        if sampler.greedy and not sampler.processors and rule != THRESHOLD:
            return match(self._greedy(at), children)
        processed = sampler.process(self.logits[at], self._prefix(slot) if sampler.processors else ())
        if rule == THRESHOLD:
            which = threshold_choice(self._probs(sampler, processed), children, self.rule.threshold)
            return (which, children[which]) if which >= 0 else (-1, sampler.draw(processed, position))
        if self.rule.pathwise or sampler.greedy or not children:
            return match(sampler.draw(processed, position), children)
        return self._reject(slot, row, processed, position, children)

    def _reject(self, slot: int, row: int, processed: Tensor, position: int, children: list[int]) -> tuple[int, int]:
        """The rejection rules: each child in turn against its coin, then a draw from what is left."""
        sampler, device = self.samplers[slot], processed.device
        q = self.draft.q(slot, row, len(processed)) if self.rule.rule == REJECTION else None
        law = sequential_law(target_probs(processed, sampler.filters), children, q)
        coins = uniforms(sampler.seed, Purpose.ACCEPT, position, len(children), device)
        noise = vocabulary_gumbel(sampler.seed, Purpose.RESIDUAL, position, len(processed), device)
        return decide(law, coins, noise)

    def _probs(self, sampler: Sampler, processed: Tensor) -> Tensor:
        """What the threshold is compared with: a greedy request's own law would be one-hot, and has no filters."""
        return target_probs(processed, Filters(1.0) if sampler.greedy else sampler.filters)

    def _greedy(self, at: int) -> int:
        if self._best_tokens is None:
            assert self._best is not None
            self._best_tokens = self._best.tolist()
        return self._best_tokens[at]

    def _prefix(self, slot: int) -> list[int]:
        """Tokens before the visited node's draw: prompt, output and the accepted path."""
        if slot not in self._prefixes:
            self._prefixes[slot] = list(self.running[slot].tokens)
        return self._prefixes[slot]
