"""Why two outputs part: the divergent prefix is decided again in fp32, plainly and through the trees.

Equal there = numeric: low precision moved logits by ulps, and the gap shows by how little. Unequal = a bug.
"""

import copy
from dataclasses import dataclass, replace

import torch

from eagle3.attention import DenseCausal
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3_infer.compare import first_difference
from eagle3_infer.config import RuleConfig, TreeConfig
from eagle3_infer.engine import Engine
from eagle3_infer.request import Request
from eagle3_infer.sampling import Sampler


@dataclass(frozen=True)
class Verdict:
    """What fp32 says of the first token in which `output` parts from `reference`.

    Args:
        kind: numeric or bug.
        position: index into the outputs; tokens there are None where an output had already ended.
        exact_plain, exact_tree: what fp32 decides after the common prefix, plainly and through the trees; None where
            it did not get there.
        gap: lead of the chosen token over the runner-up in the low-precision logits, noise included.
    """

    kind: str
    position: int
    reference_token: int | None
    output_token: int | None
    exact_plain: int | None
    exact_tree: int | None
    gap: float | None


class Replay:
    """Decides prefixes again in fp32; the exact copies are made when first needed."""

    def __init__(self, target: Target, head: Eagle3Head | None = None):
        self.target, self.head = target, head
        self._exact: tuple[Target, Eagle3Head | None] | None = None

    @torch.inference_mode()
    def explain(
        self,
        request: Request,
        reference: list[int],
        output: list[int],
        tree: TreeConfig | None,
        rule: RuleConfig | None = None,
    ) -> Verdict | None:
        """Why `output` (made with `tree`, None = plain, and `rule`) parts from `reference`; None if it does not.

        An output that ends where the other goes on is a bug: the tokens agree, so the stop rules did not.
        """
        at = first_difference(reference, output)
        if at is None:
            return None
        theirs, ours = (each[at] if at < len(each) else None for each in (reference, output))
        if theirs is None or ours is None:
            return Verdict("bug", at, theirs, ours, None, None, None)
        prefix = tuple(reference[:at])
        plain, drafted = self._plain(request, prefix), self._decide(request, prefix, tree, rule)
        kind = "numeric" if plain is not None and plain == drafted else "bug"
        return Verdict(kind, at, theirs, ours, plain, drafted, self._gap(request, prefix))

    def _plain(self, request: Request, prefix: tuple[int, ...]) -> int | None:
        """fp32's decision after the prefix by a bare root."""
        if self._sampler(request).processors:
            # penalties tell prompt from output: every round of the prefix is replayed
            return self._decide(request, prefix, None, None)
        known, forced = list(request.prompt_ids) + list(prefix[:-1]), prefix[-1:]
        return self._decide(replace(request, prompt_ids=known), forced, None, None)

    def _decide(
        self, request: Request, forced: tuple[int, ...], tree: TreeConfig | None, rule: RuleConfig | None
    ) -> int | None:
        """The token after the forced ones, every round of them replayed; None if the engine could not emit those."""
        target, head = self.exact_models()
        # as far ahead as the original drafted at this token, and no further
        limit = min(request.max_new_tokens, len(forced) + 1 + (tree.depth if tree else 0))
        asked = replace(request, forced=forced, max_new_tokens=limit, stop=(), logprobs=False)
        if tree is not None:
            # what an adaptive tree takes depends on the machine's speed; the largest holds all that it could
            tree = replace(tree, adaptive=False)
        tokens = Engine(target, head if tree else None, tree, rule=rule).generate_one(asked).token_ids
        return tokens[len(forced)] if tuple(tokens[: len(forced)]) == forced else None

    def _gap(self, request: Request, prefix: tuple[int, ...]) -> float:
        ids = torch.tensor([*request.prompt_ids, *prefix], device=self.target.device)
        rows = torch.arange(len(ids), device=ids.device)
        hidden = self.target.hidden(ids, rows, DenseCausal([len(ids)]))
        return self._sampler(request).gap(self.target.logits(hidden[-1]), len(ids), ids.tolist())

    def _sampler(self, request: Request) -> Sampler:
        return Sampler.of(request, self.target.eos_ids if request.eos_ids is None else request.eos_ids)

    def exact_models(self) -> tuple[Target, Eagle3Head | None]:
        """Target and head in fp32; copied once, where they are not."""
        if self._exact is None:
            target, head = self.target, self.head
            if target.dtype != torch.float32:
                target = Target(copy.deepcopy(target.model).float(), target.tokenizer, target.path)
            self._exact = target, None if head is None else copy.deepcopy(head).float()
        return self._exact
