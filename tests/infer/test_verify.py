"""Divergences told apart: low precision is numeric, a wrong token is a bug."""

import pytest
import torch

from eagle3.target import Target
from eagle3_infer.compare import first_difference
from eagle3_infer.config import SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request
from eagle3_infer.verify import Replay
from oracles.invariants import KnowingHead, lower, random_head
from oracles.overfit import random_prompts
from oracles.tiny import tiny_model

TREE = TreeConfig(depth=4, top_k=3, nodes=12)


def bfloat16_target() -> Target:
    """Rounded so coarsely that a different row count changes tokens now and then."""
    return Target(lower(tiny_model("llama"), torch.bfloat16))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_low_precision_divergences_are_numeric(temperature):
    target, sampling = bfloat16_target(), SamplingConfig(temperature, seed=1)
    kinds = []
    for i, prompt in enumerate(random_prompts(target, 6)):
        request = Request(prompt, sampling, max_new_tokens=40, prompt_id=i)
        plain = Engine(target).generate_one(request).token_ids
        head = KnowingHead(random_head(target).to(torch.bfloat16), prompt + plain, share=0.7)
        drafted = Engine(target, head, TREE).generate_one(request).token_ids
        found = Replay(target, head).explain(request, plain, drafted, TREE)
        assert (found is None) == (plain == drafted)
        if found is not None:
            kinds.append(found.kind)
            assert found.position == first_difference(plain, drafted)
            assert found.gap is not None
            assert 0 <= found.gap < 0.5
            assert found.exact_plain == found.exact_tree
    assert set(kinds) <= {"numeric"}
    assert kinds or temperature


def test_broken_verification_is_a_bug(monkeypatch):
    """A walk that takes any child: fp32 shows it too."""
    target = Target(tiny_model("llama"))
    head, request = random_head(target), Request([5, 6, 7], max_new_tokens=12)
    plain = Engine(target).generate_one(request).token_ids
    monkeypatch.setattr(
        "eagle3_kernels.verify_tree.reference._matching_child", lambda links, row, _: links.first_child[row]
    )
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
