"""Shapes predicted from counts: by hand, against the definition of a tree, and against what the engine then accepts."""

import random

import pytest

from eagle3_infer.config import EngineConfig, RuleConfig, SamplingConfig, TreeConfig
from eagle3_infer.costs import CostModel
from eagle3_infer.engine import Engine, Request
from eagle3_infer.tune_counts import count_offers, wide_engine
from eagle3_infer.tune_shapes import (
    NodesNeeded,
    Offers,
    Prediction,
    Root,
    around,
    at_bounds,
    count_rounds,
    finalists,
    predict,
    shapes,
)
from oracles.invariants import random_head
from oracles.overfit import overfit, random_prompts
from oracles.tiny import tiny_target

pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")


def random_tree(rng, depth, top_k):
    """Scores of all candidates below a root, expanded as the drafter does: (parents, scores) best first."""
    rows = [(0.0, 0, -1, 0)]
    frontier, number = [0], 1
    for level in range(1, depth + 1):
        here = []
        for parent in frontier:
            edges = sorted((-rng.expovariate(1.0) for _ in range(top_k)), reverse=True)
            for edge in edges:
                here.append(number)
                rows.append((rows[parent][0] + edge, level, parent, number))
                number += 1
        frontier = sorted(here, key=lambda at: (-rows[at][0], at))[:top_k]
    order = sorted(range(len(rows)), key=lambda at: (-rows[at][0], rows[at][1], at))
    place = {old: new for new, old in enumerate(order)}
    return [-1 if rows[old][2] < 0 else place[rows[old][2]] for old in order]


def held(parents, depth, top_k, nodes):
    """Rows of the best tree of that shape, straight from the definition."""
    levels, rank, seen = [0], [0], {}
    for parent in parents[1:]:
        levels.append(levels[parent] + 1)
        rank.append(seen.get(parent, 0))
        seen[parent] = rank[-1] + 1
    frontier, candidates = {0}, []
    for level in range(1, depth + 1):
        here = [r for r in range(1, len(parents)) if levels[r] == level and parents[r] in frontier and rank[r] < top_k]
        candidates += here
        frontier = set(here[:top_k])
    return set(sorted(candidates)[:nodes])


def random_root(rng, depth, top_k):
    """A random tree and a random path down it."""
    parents = random_tree(rng, depth, top_k)
    path, at = [], 0
    for _ in range(rng.randrange(depth + 1)):
        below = [row for row, parent in enumerate(parents) if parent == at and row]
        if not below:
            break
        at = rng.choice(below)
        path.append(at)
    return Root(parents, path)


def test_accepted_against_the_definition():
    rng = random.Random(0)
    roots = [random_root(rng, 4, 3) for _ in range(40)]
    offers = Offers([roots], 4)
    seen = set()
    for top_k in (1, 2, 3):
        needed = NodesNeeded(offers, top_k)
        for depth in (1, 2, 4):
            for nodes in (1, 2, 3, 5, 9, 30):
                accepted = (needed.at_depth(depth) <= nodes).sum(1)
                for root, count in zip(roots, accepted, strict=True):
                    tree = held(root.parents, depth, top_k, nodes)
                    expected = next((i for i, row in enumerate(root.path) if row not in tree), len(root.path))
                    assert count == expected
                    seen.add(expected)
    assert seen == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    "accepted, lengths, rounds",
    [([0, 0, 0], [3], 3), ([2, 9, 9], [3], 1), ([1, 0, 0, 1, 0], [3, 2], 3), ([5, 0], [2], 1), ([], [0], 0)],
)
def test_rounds_by_hand(accepted, lengths, rounds):
    """A round skips the roots that it has emitted; it never runs into the next reply."""
    assert count_rounds(accepted, lengths) == rounds


def greedy_requests(known, count):
    return [Request(ids, max_new_tokens=14 + 3 * i, prompt_id=i) for i, ids in enumerate(known.prompts[:count])]


def engine_rounds(known, tree, requests, rule=None):
    engine = Engine(known.target, known.head, tree, EngineConfig(), rule)
    return sum(engine.generate_one(request).rounds for request in requests)


def counted_rounds(offers, tree):
    accepted = (NodesNeeded(offers, tree.top_k).at_depth(tree.depth) <= tree.nodes).sum(1).tolist()
    return count_rounds(accepted, offers.lengths)


def test_counted_rounds_are_the_engines():
    """One wide draft per token tells the rounds that the engine then takes with any smaller tree."""
    known, most = overfit("llama"), TreeConfig(5, 4, 40)
    requests = greedy_requests(known, 3)
    offers = count_offers(wide_engine(known.target, known.head, most, RuleConfig(), 512), requests)
    assert offers.lengths == [13, 16, 19]
    trees = [TreeConfig.chain(1), TreeConfig.chain(5), TreeConfig(3, 2, 5), TreeConfig(5, 4, 12), most]
    taus = set()
    for tree in trees:
        rounds = counted_rounds(offers, tree)
        assert rounds == engine_rounds(known, tree, requests), tree
        taus.add(rounds)
    assert len(taus) > 2
    assert min(taus) < offers.tokens / 2, "a head that is never right tests nothing"


def test_sampled_replies_are_counted_alike():
    """Under the match rule replies hang on the noise alone, with shared noise, too."""
    known, most = overfit("llama"), TreeConfig(3, 3, 12)
    rule = RuleConfig(draft_noise="shared")
    sampling = SamplingConfig(temperature=1.0, seed=3)
    requests = [Request(p, sampling, max_new_tokens=16, prompt_id=i) for i, p in enumerate(known.prompts[:3])]
    offers = count_offers(wide_engine(known.target, known.head, most, rule, 512), requests)
    for tree in (TreeConfig.chain(2), most):
        assert counted_rounds(offers, tree) == engine_rounds(known, tree, requests, rule), tree


def test_more_requests_than_slots_and_ends():
    """Requests that join and leave, replies of one token, a prompt read in pieces, replies that end by themselves."""
    target = tiny_target("llama")
    head = random_head(target, draft_vocab_size=40)
    prompts = random_prompts(target, 11)
    plain = Engine(target, config=EngineConfig(slots=4)).generate(
        [Request(p, max_new_tokens=1 + 2 * (i % 5), prompt_id=i) for i, p in enumerate(prompts)]
    )
    eos = plain[3].token_ids[1:2]
    requests = [
        Request(p, max_new_tokens=1 + 2 * (i % 5), prompt_id=i, eos_ids=tuple(eos)) for i, p in enumerate(prompts)
    ]
    engine = wide_engine(target, head, TreeConfig(3, 2, 8), RuleConfig(), prefill_rows=5)
    offers = count_offers(engine, requests)
    # a token per root, and the last of each reply
    assert offers.lengths == [
        next((at for at, token in enumerate(whole.token_ids) if token in eos), len(whole.token_ids) - 1)
        for whole in plain
    ]
    assert 0 in offers.lengths and len(set(offers.lengths)) > 3


def flat_cost(row, level, base=10.0):
    """Seconds that grow with rows by `row`, and by `level` per draft level."""
    rows = [1, 2, 4, 8, 16, 32, 64]
    return CostModel({n: base + row * n for n in rows}, {1: level, 64: level}, {1: level, 64: level})


@pytest.fixture(scope="module")
def offers():
    rng = random.Random(1)
    return Offers([[random_root(rng, 4, 4) for _ in range(60)]], 4)


def test_dear_rows_want_small_trees_and_dear_levels_shallow_ones(offers):
    most = TreeConfig(4, 4, 32)
    free = predict(offers, flat_cost(0.001, 0.001), 1, most)[0].tree
    dear_rows = predict(offers, flat_cost(5.0, 0.001), 1, most)[0].tree
    dear_levels = predict(offers, flat_cost(0.001, 8.0), 1, most)[0].tree
    assert free.nodes > dear_rows.nodes
    assert free.depth > dear_levels.depth
    assert at_bounds(free, most)


def test_prediction_is_tokens_over_seconds(offers):
    cost = flat_cost(0.5, 2.0)
    cost.observe_round(1, 1, drafted=True, verify=cost.verify(1), rest=3.0)
    each = next(p for p in predict(offers, cost, 2, TreeConfig(4, 4, 32)) if p.tree == TreeConfig(3, 2, 8))
    # two slots of nine rows; one first step and two more levels
    assert each.tokens_per_second == pytest.approx(2 * each.tau / (10 + 0.5 * 18 + 2.0 * 3 + 3.0))
    assert each.tau == pytest.approx(60 / counted_rounds(offers, each.tree))


def test_shapes_are_legal_unlike_and_within_bounds():
    most = TreeConfig(5, 6, 40)
    found = list(shapes(most))
    assert len(found) == len(set(found))
    assert {tree.top_k for tree in found} == {1, 2, 3, 4, 6}
    assert {tree.depth for tree in found} == {1, 2, 3, 4, 5}
    assert max(tree.nodes for tree in found) == 40
    assert all(tree.top_k <= tree.nodes for tree in found)
    assert list(shapes(TreeConfig.chain(2))) == [TreeConfig.chain(1), TreeConfig.chain(2)]
    assert list(shapes(TreeConfig(1, 1, 1))) == [TreeConfig.chain(1)]


@pytest.mark.parametrize("top_k, tried", [(2, {1, 2}), (5, {1, 2, 3, 4, 5}), (10, {1, 2, 3, 4, 6, 8, 10})])
def test_the_widest_that_is_asked_for_is_looked_at(top_k, tried):
    """Also where it is none of the steps; only then can the answer say that it is as wide as was looked at."""
    most = TreeConfig(3, top_k, min(30, top_k + 2 * top_k**2))
    assert {tree.top_k for tree in shapes(most)} == tried
    assert any(at_bounds(tree, most) == ["depth", "top_k", "nodes"] for tree in shapes(most))


def test_finalists_differ_in_nodes_and_have_a_chain():
    trees = [(4, 4, 16), (3, 4, 16), (4, 3, 12), (3, 3, 8), (2, 2, 6), (2, 1, 2)]
    predictions = [Prediction(TreeConfig(*tree), 2.0, 100.0 - i) for i, tree in enumerate(trees)]
    chosen = [each.tree for each in finalists(predictions, 3)]
    assert chosen == [TreeConfig(4, 4, 16), TreeConfig(3, 3, 8), TreeConfig(2, 1, 2)]
    assert [each.tree.nodes for each in finalists(predictions, 2)] == [16, 2]
    assert [each.tree.nodes for each in finalists(predictions, 9)] == [16, 8, 2]
    # of one, the best
    assert [each.tree.nodes for each in finalists(predictions, 1)] == [16]


def test_adaptive_tree_around_the_best():
    most = TreeConfig(6, 8, 64)
    assert around(TreeConfig(4, 4, 16), most) == TreeConfig(6, 4, 32, adaptive=True)
    assert around(TreeConfig.chain(1), most).adaptive
    assert around(TreeConfig(6, 8, 64), most) == TreeConfig(6, 8, 64, adaptive=True)
    assert around(TreeConfig.chain(1), TreeConfig.chain(1)) == TreeConfig(1, 1, 1, adaptive=True)
