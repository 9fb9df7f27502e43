"""Divergences told apart: low precision is numeric, a wrong token is a bug."""

import pytest
import torch

from eagle3.target import Target
from eagle3_infer.compare import first_difference
from eagle3_infer.config import RuleConfig, SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request
from eagle3_infer.replay import Replay
from oracles.invariants import KnowingHead, lower, random_head
from oracles.overfit import random_prompts
from oracles.tiny import tiny_model

TREE = TreeConfig(depth=4, top_k=3, nodes=12)


def bfloat16_target() -> Target:
    """Rounded so coarsely that a different row count changes tokens now and then."""
    return Target(lower(tiny_model("llama"), torch.bfloat16))


PENALISED = SamplingConfig(repetition_penalty=1.2, presence_penalty=2.0, frequency_penalty=1.0, min_tokens=20)


@pytest.mark.parametrize(
    "sampling, rule",
    [
        (SamplingConfig(), RuleConfig()),
        (SamplingConfig(0.8, seed=1), RuleConfig()),
        (SamplingConfig(0.8, seed=1), RuleConfig(draft_noise="shared")),
        (PENALISED, RuleConfig()),
    ],
    ids=["greedy", "sampled", "shared noise", "penalties"],
)
def test_low_precision_divergences_are_numeric(sampling, rule):
    target = bfloat16_target()
    kinds = []
    for i, prompt in enumerate(random_prompts(target, 6)):
        request = Request(prompt, sampling, max_new_tokens=40, prompt_id=i)
        plain = Engine(target).generate_one(request).token_ids
        head = KnowingHead(random_head(target).to(torch.bfloat16), prompt + plain, share=0.7)
        drafted = Engine(target, head, TREE, rule=rule).generate_one(request).token_ids
        found = Replay(target, head).explain(request, plain, drafted, TREE, rule)
        assert (found is None) == (plain == drafted)
        if found is not None:
            kinds.append(found.kind)
            assert found.position == first_difference(plain, drafted)
            assert found.gap is not None
            assert 0 <= found.gap < 0.5
            assert found.exact_plain == found.exact_tree
    assert set(kinds) <= {"numeric"}
    assert kinds


def test_broken_verification_is_a_bug(monkeypatch):
    """A walk that takes any child: fp32 shows it too."""
    target = Target(tiny_model("llama"))
    head, request = random_head(target), Request([5, 6, 7], max_new_tokens=12)
    plain = Engine(target).generate_one(request).token_ids

    def any_child(token: int, children: list[int]) -> tuple[int, int]:
        return (0 if children else -1), token

    for module in ("eagle3_kernels.verify_tree.reference", "eagle3_infer.rules"):
        monkeypatch.setattr(f"{module}.match", any_child)
    wrong = Engine(target, head, TREE).generate_one(request).token_ids
    found = Replay(target, head).explain(request, plain, wrong, TREE)
    assert found is not None
    assert found.kind == "bug"
    assert found.exact_plain == plain[found.position]


def test_an_output_that_ends_early_is_a_bug():
    target = Target(tiny_model("llama"))
    found = Replay(target).explain(Request([5, 6, 7]), [1, 2, 3], [1, 2], None)
    assert found is not None
    assert (found.kind, found.position, found.reference_token, found.output_token) == ("bug", 2, 3, None)
