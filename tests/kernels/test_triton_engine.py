"""The engine on Triton's kernels, in the interpreter: what it emits is what it emits on the references (fp32).

Catches an op whose kernel is right alone and wrong in the engine: strides of views, padded rows, pages, dtypes.
"""

from functools import lru_cache

import pytest

from eagle3.config import HeadOptions
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.vocab import identity_map
from eagle3_infer.config import EngineConfig, RuleConfig, SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request
from eagle3_infer.rules import RoundRule
from eagle3_kernels.dispatch import set_kernels
from oracles.invariants import CheckedEngine, KnowingHead, shifted_target
from oracles.overfit import random_prompts

CHAIN, TREE = TreeConfig.chain(2), TreeConfig(depth=2, top_k=2, nodes=5)
NEW = 7


@lru_cache(maxsize=4)
def models(family: str):
    target = shifted_target(family, num_hidden_layers=2)
    prompts = random_prompts(target, 4)
    replies = [r.token_ids for r in Engine(target).generate([Request(p, max_new_tokens=NEW) for p in prompts])]
    head = Eagle3Head.for_target(target, identity_map(target.vocab_size), HeadOptions(capture_layers=(0, 1)))
    return target, prompts, KnowingHead(head.requires_grad_(False), prompts[0] + replies[0], share=0.8)


def run(family: str, tree: TreeConfig, sampling: SamplingConfig, rule: RuleConfig | None, slots: int):
    target, prompts, head = models(family)
    requests = [Request(prompts[i], sampling, max_new_tokens=NEW, prompt_id=i) for i in range(slots)]
    config = EngineConfig(slots=slots, page_size=8, prefill_rows=9)
    results = CheckedEngine(target, head, tree, config, rule).generate(requests)
    return [(r.token_ids, r.run_lengths, r.offered_by_level) for r in results]


@pytest.fixture
def triton():
    yield lambda: set_kernels("triton")
    set_kernels(None)


@pytest.mark.parametrize("tree, slots", [(CHAIN, 1), (TREE, 1), (TREE, 4)])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_greedy(family, tree, slots, triton):
    expected = run(family, tree, SamplingConfig(), None, slots)
    triton()
    assert run(family, tree, SamplingConfig(), None, slots) == expected


@pytest.mark.parametrize(
    "rule",
    [
        RuleConfig(),
        RuleConfig(draft_noise="shared"),
        RuleConfig("target_only"),
        RuleConfig("rejection"),
        RuleConfig("threshold", threshold=0.05),
    ],
)
def test_sampled(rule, triton, monkeypatch):
    sampling = SamplingConfig(0.8, seed=4)
    expected = run("llama", TREE, sampling, rule, 2)
    triton()
    asked, plain = [], RoundRule.__call__
    monkeypatch.setattr(RoundRule, "__call__", lambda self, *node: asked.append(node[-1]) or plain(self, *node))
    assert run("llama", TREE, sampling, rule, 2) == expected
    # a kernel walks by the rules: the host is asked for bare roots alone
    assert rule.pathwise or not any(asked)
