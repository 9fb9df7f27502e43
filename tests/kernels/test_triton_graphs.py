"""Rounds of fixed shapes on Triton's kernels, in the interpreter: they emit what the references do, and are graphs.

Every launch and every torch op of a replay is held to its capture, down to the model's own: a launcher that waits for
the device, takes a number from the host or writes to a tensor at another address is seen here.
"""

import pytest

from eagle3.config import HeadOptions
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.vocab import identity_map
from eagle3_infer.config import EngineConfig, RuleConfig, SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request
from eagle3_kernels.dispatch import set_kernels
from oracles.captured import FakeGraphs
from oracles.invariants import KnowingHead, shifted_target
from oracles.overfit import random_prompts

SHARED = RuleConfig(draft_noise="shared")


class Captured(Engine):
    """Every fixed round is a checked replay."""

    graphs = FakeGraphs()

    def _graphs(self):
        self.graphs = FakeGraphs(kernels=())
        return self.graphs


@pytest.fixture
def triton():
    yield lambda: set_kernels("triton")
    set_kernels(None)


@pytest.mark.parametrize(
    "tree, rule, sampling, slots",
    [
        (TreeConfig(2, 2, 4), None, SamplingConfig(), 2),
        (TreeConfig.chain(2), SHARED, SamplingConfig(0.9, seed=4), 1),
        pytest.param(TreeConfig(2, 2, 4), None, SamplingConfig(0.9, min_p=0.05, seed=4), 2, marks=pytest.mark.full),
        pytest.param(TreeConfig(2, 2, 4), SHARED, SamplingConfig(0.9, seed=4), 3, marks=pytest.mark.full),
        pytest.param(None, None, SamplingConfig(), 2, marks=pytest.mark.full),
    ],
)
def test_rounds_of_kernels_are_graphs(tree, rule, sampling, slots, triton):
    target = shifted_target("llama", num_hidden_layers=2)
    prompts = random_prompts(target, slots)
    requests = [Request(prompt, sampling, max_new_tokens=5 - i, prompt_id=i) for i, prompt in enumerate(prompts)]
    plain = Engine(target).generate(requests)
    head = Eagle3Head.for_target(target, identity_map(target.vocab_size), HeadOptions(capture_layers=(0, 1)))
    head = KnowingHead(head.requires_grad_(False), prompts[0] + plain[0].token_ids, share=0.5)
    triton()
    config = EngineConfig(slots=slots, page_size=8, graphs="fixed")
    engine = Captured(target, head if tree else None, tree, config, rule)
    assert [result.token_ids for result in engine.generate(requests)] == [result.token_ids for result in plain]
    assert engine.graphs.captures >= slots
    assert engine.graphs.replays >= 3
    # attention, walk, first step, relocation and choice of tokens at least; levels, trees and features with a head
    launches = {name for name in engine.graphs.ops if name.startswith("launch")}
    assert len(launches) >= (12 if tree else 6), launches
