"""Output == plain == transformers' generate, whatever the head, the tree, the sampling, the batch (fp32)."""

from functools import lru_cache

import pytest
import torch

from eagle3_infer.config import EngineConfig, SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request, Result
from eagle3_infer.kv import Block, KVPool, PagedContext
from eagle3_kernels.build_tree import link_tree
from oracles.invariants import CheckedEngine, KnowingHead, dense_logits, random_head, shifted_target, target_shapes
from oracles.overfit import greedy, overfit, random_prompts
from oracles.tiny import FAMILIES

CHAIN, TREE = TreeConfig.chain(3), TreeConfig(depth=4, top_k=3, nodes=12)
WIDE = TreeConfig(depth=3, top_k=8, nodes=40)
NEW = 24


@lru_cache(maxsize=8)
def target_of(family: str):
    return shifted_target(family)


def generate(target, head, tree, prompts, sampling=None, slots=1, engine=Engine, new=NEW) -> list[Result]:
    requests = [
        Request(prompt, sampling or SamplingConfig(), max_new_tokens=new, prompt_id=i)
        for i, prompt in enumerate(prompts)
    ]
    return engine(target, head, tree, EngineConfig(slots=slots, page_size=8)).generate(requests)


def tokens(results: list[Result]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize("family", FAMILIES)
def test_random_and_mapped_heads_change_nothing(family):
    target = target_of(family)
    prompts = random_prompts(target, 3)
    expected = [greedy(target, prompt, NEW) for prompt in prompts]
    assert tokens(generate(target, None, None, prompts)) == expected
    for head in (random_head(target), random_head(target, 50)):
        for tree, slots in ((CHAIN, 1), (TREE, 3)):
            assert tokens(generate(target, head, tree, prompts, slots=slots)) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_known_tokens_are_accepted_and_pools_stay_true(family):
    """Runs of several tokens, relocation and re-drafting, with both pools checked after every round."""
    target = target_of(family)
    prompt = random_prompts(target, 1)[0]
    expected = greedy(target, prompt, NEW)
    head = KnowingHead(random_head(target), prompt + expected, share=0.7)
    for tree in (CHAIN, TREE, WIDE):
        [result] = generate(target, head, tree, [prompt], engine=CheckedEngine)
        assert result.token_ids == expected
        assert result.rounds < NEW * 0.7


@pytest.mark.parametrize("family", FAMILIES)
def test_overfit_head_accepts_and_changes_nothing(family):
    known = overfit(family)
    new = len(known.replies[0])
    for tree, slots in ((CHAIN, 1), (TREE, 2)):
        results = generate(known.target, known.head, tree, known.prompts, slots=slots, new=new)
        assert tokens(results) == known.replies
        assert sum(r.rounds for r in results) < 0.9 * sum(sum(r.run_lengths) for r in results)


@pytest.mark.parametrize("temperature, top_k, top_p", [(0.7, 0, 1.0), (1.0, 0, 1.0), (0.3, 20, 0.95)])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_sampled_outputs_are_plains_of_the_same_seed(family, temperature, top_k, top_p):
    target, sampling = target_of(family), SamplingConfig(temperature, top_k, top_p, seed=11)
    prompts = random_prompts(target, 3)
    expected = tokens(generate(target, None, None, prompts, sampling))
    assert expected != tokens(generate(target, None, None, prompts))
    for tree, slots in ((CHAIN, 1), (TREE, 3)):
        assert tokens(generate(target, random_head(target), tree, prompts, sampling, slots)) == expected
    head = KnowingHead(random_head(target), prompts[0] + expected[0], share=0.7)
    for tree in (CHAIN, TREE):
        [result] = generate(target, head, tree, prompts[:1], sampling, engine=CheckedEngine)
        assert result.token_ids == expected[0]
        assert result.rounds < NEW * 0.7


def test_requests_of_one_run_share_no_noise():
    """The same prompt under another id, turn, sample or seed draws other tokens; the same key draws the same."""
    target = target_of("llama")
    prompt = random_prompts(target, 1)[0]
    keys = [{}, {"prompt_id": 1}, {"turn": 1}, {"sample": 1}, {}]
    requests = [Request(prompt, SamplingConfig(1.0, seed=3), max_new_tokens=NEW, **key) for key in keys]
    outputs = tokens(Engine(target, config=EngineConfig(slots=2)).generate(requests))
    assert outputs[0] == outputs[4]
    assert len({tuple(output) for output in outputs}) == 4


def test_a_row_does_not_depend_on_its_batch():
    """Greedy and sampled requests of different lengths and limits join and leave three slots."""
    known = overfit("llama")
    requests = [
        Request(
            known.prompts[i % 4],
            SamplingConfig(0.0 if i % 3 else 0.8, seed=5),
            max_new_tokens=5 + 7 * (i % 4),
            prompt_id=i,
        )
        for i in range(9)
    ]
    one_by_one = [Engine(known.target, known.head, TREE).generate_one(request) for request in requests]
    batched = CheckedEngine(known.target, known.head, TREE, EngineConfig(slots=3, page_size=8)).generate(requests)
    assert tokens(batched) == tokens(one_by_one)
    assert [r.run_lengths for r in batched] == [r.run_lengths for r in one_by_one]
    assert [r.accepted_by_level for r in batched] == [r.accepted_by_level for r in one_by_one]


def test_chain_is_the_tree_with_one_child():
    known = overfit("llama")
    for tree, chain in zip(
        generate(known.target, known.head, TreeConfig(3, 1, 3), known.prompts),
        generate(known.target, known.head, TreeConfig.chain(3), known.prompts),
        strict=True,
    ):
        assert (tree.token_ids, tree.run_lengths) == (chain.token_ids, chain.run_lengths)


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_rows_logits_are_those_of_their_root_paths(family):
    """Two slots with prefixes of different lengths, each with a random tree, in one packed forward."""
    target, draw = target_of(family), torch.Generator().manual_seed(3)
    parent = torch.tensor([[-1, 0, 0, 1, 1, 3, 2, 6, 7, 7, 9, 0]] * 2)
    tree = link_tree(
        torch.tensor([12, 12]), torch.randint(0, 300, (2, 12), generator=draw), parent, torch.zeros(2, 12), 6
    )
    prefixes = random_prompts(target, 14)[-2:]
    pool = KVPool(target_shapes(target), slots=2, pages=16, page_size=8)
    for slot, prefix in enumerate(prefixes):
        assert pool.assign(slot, len(prefix) + 12)
    lens, rows = [len(p) for p in prefixes], [torch.arange(len(p)) for p in prefixes]
    blocks = [Block(pool.view([slot], [0], row[None]), len(row)) for slot, row in enumerate(rows)]
    target.hidden(torch.tensor([*prefixes[0], *prefixes[1]]), torch.cat(rows), PagedContext(pool, blocks))
    view = pool.view([0, 1], lens, tree.position, tree.ancestor_mask)
    positions = (view.lens[:, None] + tree.position).flatten().long()
    logits = target.logits(
        target.hidden(tree.tokens.flatten().long(), positions, PagedContext(pool, [Block(view, 12)]))
    )
    for slot, prefix in enumerate(prefixes):
        for path in tree.paths(slot).tolist():
            path = [row for row in path if row >= 0]
            alone = dense_logits(target, prefix + [int(tree.tokens[slot, row]) for row in path])[len(prefix) :]
            torch.testing.assert_close(logits.unflatten(0, (2, 12))[slot, path], alone, rtol=1e-4, atol=2e-4)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "tree", [TreeConfig.chain(1), TreeConfig.chain(7), TreeConfig(1, 8, 8), TreeConfig(6, 8, 60), WIDE]
)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_grid_of_trees(family, tree, temperature):
    known, sampling = overfit(family), SamplingConfig(temperature, seed=2)
    expected = tokens(generate(known.target, None, None, known.prompts, sampling, new=40))
    for head, engine in ((known.head, CheckedEngine), (random_head(known.target), Engine)):
        results = generate(known.target, head, tree, known.prompts, sampling, slots=3, engine=engine, new=40)
        assert tokens(results) == expected
