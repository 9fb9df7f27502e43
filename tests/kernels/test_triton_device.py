"""The engine on a GPU, with graphs and without, emits what the references emit on a CPU (fp32, so tokens are equal).

Catches what the interpreter cannot: launches that run ahead of each other's data, graphs that hold an old address.
Without a GPU one run goes through the interpreter.
"""

from functools import lru_cache

import pytest

from eagle3.config import HeadOptions
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.vocab import identity_map
from eagle3_infer.config import EngineConfig, RuleConfig, SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request
from eagle3_kernels.dispatch import set_kernels
from eagle3_kernels.testing import device
from oracles.invariants import KnowingHead, shifted_target
from oracles.overfit import random_prompts

pytest.importorskip("triton")
# a graph that could not be captured falls back: here that is a failure
pytestmark = pytest.mark.filterwarnings("error:rounds run without CUDA graphs")
ON_GPU = device().type == "cuda"
NEW = 24 if ON_GPU else 5
CHAIN, TREE, WIDE = TreeConfig.chain(3), TreeConfig(depth=3, top_k=3, nodes=8), TreeConfig(depth=5, top_k=8, nodes=60)
GREEDY, WARM = SamplingConfig(), SamplingConfig(0.8, seed=4)
only_gpu = pytest.mark.skipif(not ON_GPU, reason="no GPU: the interpreter's engine is tested in test_triton_engine.py")


@pytest.fixture
def triton():
    yield lambda: set_kernels("triton")
    set_kernels(None)


def requests(prompts: list[list[int]], sampling: SamplingConfig) -> list[Request]:
    return [Request(p, sampling, max_new_tokens=NEW - i, prompt_id=i) for i, p in enumerate(prompts)]


@lru_cache(maxsize=4)
def plain(family: str, sampling: SamplingConfig, slots: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and plain decoding's tokens by the references on the CPU."""
    set_kernels("torch")
    target = shifted_target(family)
    prompts = random_prompts(target, slots)
    return prompts, [r.token_ids for r in Engine(target).generate(requests(prompts, sampling))]


def knowing_head(target, known: list[int]) -> KnowingHead:
    head = Eagle3Head.for_target(target, identity_map(target.vocab_size), HeadOptions(capture_layers=(1, 3, 4)))
    head = KnowingHead(head.requires_grad_(False), known, share=0.7)
    head.known, head.knows = head.known.to(target.device), head.knows.to(target.device)
    return head


def check(family: str, tree: TreeConfig, sampling: SamplingConfig, slots: int, graphs: str, triton, rule=None) -> None:
    prompts, expected = plain(family, sampling, slots)
    target = shifted_target(family)
    target.model.to(device())
    head = knowing_head(target, prompts[0] + expected[0])
    triton()
    results = Engine(target, head, tree, EngineConfig(slots=slots, page_size=8, graphs=graphs), rule).generate(
        requests(prompts, sampling)
    )
    assert [r.token_ids for r in results] == expected
    assert max(max(r.run_lengths) for r in results) > 0, "nothing was accepted, so nothing was moved"


def test_one_chain(triton):
    check("llama", CHAIN, GREEDY, 1, "off", triton)


@only_gpu
@pytest.mark.parametrize("graphs", ["auto", "fixed", "off"])
@pytest.mark.parametrize("tree, slots", [(CHAIN, 1), (TREE, 4), (WIDE, 3)])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_engine_on_a_gpu(family, tree, slots, sampling, graphs, triton):
    check(family, tree, sampling, slots, graphs, triton)


@only_gpu
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_shared_noise_on_a_gpu(graphs, triton):
    check("llama", TREE, WARM, 2, graphs, triton, RuleConfig(draft_noise="shared"))
