"""Targets whose layers are not alike: tree mode == transformers' greedy decoding in fp32, and pools stay true.

The six plain families are in test_lossless; what no target can be is in test_target.
"""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from eagle3.attention import AttentionCall, DenseCausal
from eagle3.config import HeadOptions
from eagle3.errors import UnsupportedTargetError
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3.vocab import identity_map
from eagle3_infer.config import EngineConfig, SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request, Result
from eagle3_infer.kv import Block, KVPool, KVShape, PagedContext
from eagle3_kernels.build_tree import link_tree
from oracles.invariants import CheckedEngine, KnowingHead, dense_logits, random_head, shifted_target, target_shapes
from oracles.overfit import greedy, random_prompts
from oracles.tiny import UNEVEN_FAMILIES

CHAIN, TREE = TreeConfig.chain(3), TreeConfig(depth=4, top_k=3, nodes=12)
WIDE = TreeConfig(depth=3, top_k=8, nodes=40)
# prompts of 4 to 6 tokens: every output is longer than the windows of 12
NEW = 28
# where the target's own shape is none for a head: latent attention, two widths of heads
OPTIONS = {
    "deepseek_v3": HeadOptions(num_attention_heads=4, num_key_value_heads=2, head_dim=16),
    "gemma4": HeadOptions(head_dim=32, num_key_value_heads=1),
    "mimo_v2_flash": HeadOptions(head_dim=24, num_key_value_heads=2, sliding_window=12),
}


@lru_cache(maxsize=8)
def target_of(family: str) -> Target:
    return shifted_target(family)


def shaped_head(family: str) -> Eagle3Head:
    """A random head over the whole vocabulary."""
    target = target_of(family)
    head = Eagle3Head.for_target(target, identity_map(target.vocab_size), OPTIONS.get(family))
    return head.requires_grad_(False)


def generate(target, head, tree, prompts, sampling=None, slots=1, engine=Engine) -> list[Result]:
    requests = [
        Request(prompt, sampling or SamplingConfig(), max_new_tokens=NEW, prompt_id=i)
        for i, prompt in enumerate(prompts)
    ]
    return engine(target, head, tree, EngineConfig(slots=slots, page_size=8)).generate(requests)


def tokens(results: list[Result]) -> list[list[int]]:
    return [result.token_ids for result in results]


class Listening(DenseCausal):
    """Keeps what each layer asks for."""

    def __init__(self, lengths):
        super().__init__(lengths)
        self.calls: dict[int, AttentionCall] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls[call.layer] = call
        return super().attend(call)


def layer_calls(family: str) -> list[AttentionCall]:
    ctx, one = Listening([1]), torch.zeros(1, dtype=torch.int64)
    target_of(family).hidden(one, one, ctx)
    return [ctx.calls[layer] for layer in sorted(ctx.calls)]


@pytest.mark.parametrize("family", ["mistral", "gemma2", *UNEVEN_FAMILIES])
def test_each_family_brings_what_it_is_here_for(family):
    """Catches: a tiny model without the window, sinks or shapes that its family is tested for."""
    calls = layer_calls(family)
    windows = [call.window for call in calls]
    sinks = [call.sinks is not None for call in calls]
    shapes = target_shapes(target_of(family))
    if family == "mistral":
        assert windows == [12] * 8
    elif family not in ("deepseek_v3", "qwen3_moe"):
        assert windows == [12, None] * 4
    assert [call.softcap is not None for call in calls] == [family == "gemma2"] * 8
    assert sinks == {"gpt_oss": [True] * 8, "mimo_v2_flash": [True, False] * 4}.get(family, [False] * 8)
    expected = {
        "deepseek_v3": {KVShape(4, 24, 16)},
        "gemma4": {KVShape(2, 16, 16), KVShape(1, 32, 32)},
        "mimo_v2_flash": {KVShape(4, 24, 16), KVShape(2, 24, 16)},
        "qwen3_moe": {KVShape(2, 32, 32)},
    }
    assert set(shapes) == expected.get(family, {KVShape(2, 16, 16)})


@pytest.mark.parametrize("family", UNEVEN_FAMILIES)
def test_random_and_mapped_heads_change_nothing(family):
    target = target_of(family)
    prompts = random_prompts(target, 2)
    expected = [greedy(target, prompt, NEW) for prompt in prompts]
    assert tokens(generate(target, None, None, prompts)) == expected
    for head in (shaped_head(family), random_head(target, 50)):
        for tree, slots in ((CHAIN, 1), (TREE, 2)):
            assert tokens(generate(target, head, tree, prompts, slots=slots)) == expected


@pytest.mark.parametrize("family", UNEVEN_FAMILIES)
def test_known_tokens_are_accepted_and_pools_stay_true(family):
    """Runs of several tokens, relocation and re-drafting past the window, both pools checked after every round."""
    target = target_of(family)
    prompt = random_prompts(target, 1)[0]
    expected = greedy(target, prompt, NEW)
    head = KnowingHead(shaped_head(family), prompt + expected, share=0.7)
    for tree in (CHAIN, TREE, WIDE):
        [result] = generate(target, head, tree, [prompt], engine=CheckedEngine)
        assert result.token_ids == expected
        assert result.rounds < NEW * 0.7


@pytest.mark.parametrize("family", UNEVEN_FAMILIES)
def test_sampled_outputs_are_plains_of_the_same_seed(family):
    target, sampling = target_of(family), SamplingConfig(0.8, top_p=0.95, seed=11)
    prompts = random_prompts(target, 2)
    expected = tokens(generate(target, None, None, prompts, sampling))
    head = KnowingHead(shaped_head(family), prompts[0] + expected[0], share=0.7)
    results = generate(target, head, TREE, prompts, sampling, slots=2, engine=CheckedEngine)
    assert tokens(results) == expected
    assert results[0].rounds < NEW * 0.7


def check_tree_rows(family: str, context: type[PagedContext]) -> None:
    """A prefix longer than the window, and a tree whose rows run ahead of their positions."""
    target, draw = target_of(family), torch.Generator().manual_seed(3)
    parent = torch.tensor([[-1, 0, 0, 1, 1, 3, 2, 6, 7, 7, 9, 0]])
    rows, ids = parent.shape[1], torch.randint(0, 300, parent.shape, generator=draw)
    tree = link_tree(torch.tensor([rows]), ids, parent, torch.zeros(parent.shape), 6)
    prefix = random_prompts(target, 18)[-1]
    pool = KVPool(target_shapes(target), slots=1, pages=1, page_size=64)
    assert pool.assign(0, len(prefix) + rows)
    at = torch.arange(len(prefix))
    target.hidden(torch.tensor(prefix), at, context(pool, [Block(pool.view([0], [0], at[None]), len(prefix))]))
    view = pool.view([0], [len(prefix)], tree.position, tree.ancestor_mask)
    positions = (len(prefix) + tree.position[0]).long()
    logits = target.logits(target.hidden(ids[0], positions, context(pool, [Block(view, rows)])))
    for path in tree.paths().tolist():
        path = [row for row in path if row >= 0]
        alone = dense_logits(target, prefix + ids[0, path].tolist())[len(prefix) :]
        torch.testing.assert_close(logits[path], alone, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("family", UNEVEN_FAMILIES)
def test_tree_rows_logits_are_those_of_their_root_paths(family):
    check_tree_rows(family, PagedContext)


class WindowByRow(PagedContext):
    """A wrong context: a row's window counts K/V rows, not positions."""

    def attend(self, call: AttentionCall) -> Tensor:
        views = [block.view for block in self.blocks]
        levels = [view.positions for view in views]
        for view in views:
            view.positions = torch.arange(view.fresh, dtype=torch.int32).expand_as(view.positions)
        out = super().attend(call)
        for view, level in zip(views, levels, strict=True):
            view.positions = level
        return out


class NoWindow(PagedContext):
    def attend(self, call: AttentionCall) -> Tensor:
        return super().attend(replace(call, window=None))


class NoSinks(PagedContext):
    def attend(self, call: AttentionCall) -> Tensor:
        return super().attend(replace(call, sinks=None))


@pytest.mark.parametrize(
    "family, context",
    [("gemma3", WindowByRow), ("gpt_oss", WindowByRow), ("gemma4", NoWindow), ("gpt_oss", NoSinks)],
)
def test_a_wrong_context_is_noticed(family, context):
    """Negative control: the comparison above fails without sinks, without windows and with windows of rows."""
    with pytest.raises(AssertionError, match="not close"):
        check_tree_rows(family, context)


def test_streams_of_hidden_states_decode_plainly_and_have_no_head():
    """Gemma 3n hands on four streams per token: no layer's output is one hidden state."""
    target = target_of("gemma3n")
    prompt = random_prompts(target, 1)[0]
    assert tokens(generate(target, None, None, [prompt])) == [greedy(target, prompt, NEW)]
    options = HeadOptions(intermediate_size=96)
    head = Eagle3Head.for_target(target, identity_map(target.vocab_size), options).requires_grad_(False)
    with pytest.raises(UnsupportedTargetError, match="layer 1 hands on 4 streams of hidden states"):
        generate(target, head, TREE, [prompt])
