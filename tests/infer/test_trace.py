"""Traced rounds against the engine's own counts, for every rule and kind of tree."""

from dataclasses import replace

import pytest

from eagle3_infer.config import EngineConfig, RuleConfig, SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request
from eagle3_infer.trace import TracedTree, trace
from oracles.invariants import whimsical
from oracles.overfit import overfit

pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")

TREES = {
    "chain": TreeConfig.chain(4),
    "tree": TreeConfig(3, 3, 12),
    "wide": TreeConfig(3, 4, 16, level_weight=2.0),
    "auto": TreeConfig(4, 3, 12, adaptive=True),
}


def requests(count, **sampling):
    known = overfit("llama")
    prompts = [known.prompts[i % len(known.prompts)][i // len(known.prompts) :] for i in range(count)]
    sampled = SamplingConfig(**sampling)
    return [Request(ids, sampled, max_new_tokens=11 + 6 * i, prompt_id=i) for i, ids in enumerate(prompts)]


def engine(tree, rule=None, slots=2):
    known = overfit("llama")
    return Engine(known.target, known.head, tree, EngineConfig(slots=slots, graphs="off"), rule)


def accepted_by_level(rounds):
    """Of rounds that no stop rule cut."""
    deepest = max((len(r.path) for r in rounds), default=0)
    return [sum(len(r.path) > level for r in rounds) for level in range(deepest)]


@pytest.mark.parametrize("tree, slots", [("chain", 1), ("tree", 3), ("wide", 2), ("auto", 1), ("auto", 3)])
def test_rounds_are_the_engines_own(tree, slots, monkeypatch):
    """Trees of another request, of the round before or after; trees that differ from round to round, and none."""
    if tree == "auto":
        whimsical(monkeypatch)
    asked = requests(4)
    traced = dict(trace(engine(TREES[tree], slots=slots), asked))
    assert sorted(traced) == list(range(4))
    for number, (result, rounds) in ((n, (t.result, t.rounds)) for n, t in traced.items()):
        alone = engine(TREES[tree]).generate_one(asked[number])
        assert result.token_ids == alone.token_ids
        assert [len(r.emitted) for r in rounds] == result.run_lengths
        assert [t for r in rounds for t in r.emitted] == result.token_ids[1:]
        assert sum(len(r.tree.tokens) - 1 for r in rounds) == result.nodes
        # nothing stops these but the number of tokens, and drafts do not go beyond it
        assert accepted_by_level(rounds) == result.accepted_by_level
        before = [result.token_ids[:1], *(r.emitted for r in rounds)]
        assert [r.tree.tokens[0] for r in rounds] == [run[-1] for run in before[:-1]]
    assert sum(len(r.path) for t in traced.values() for r in t.rounds) > 10, "a head that is never right tests nothing"


def test_scores_are_sums_of_the_edges():
    for _, reply in trace(engine(TREES["tree"]), requests(2)):
        for r in reply.rounds:
            for row, parent in enumerate(r.tree.parents[1:], start=1):
                expected = r.tree.scores[parent] + r.tree.edges[row]
                assert r.tree.scores[row] == pytest.approx(expected, abs=1e-5) and r.tree.edges[row] <= 0


@pytest.mark.parametrize("rule", ["match", "target_only", "rejection", "threshold"])
def test_sampled_rounds(rule):
    """Accepted rows are the engine's count, also where a rule refuses a draft and then draws that very token."""
    asked = requests(4, temperature=0.5, seed=3)
    traced = dict(trace(engine(TREES["tree"], RuleConfig(rule, threshold=0.6), slots=1), asked))
    alone = engine(TREES["tree"], RuleConfig(rule, threshold=0.6), slots=1).generate(asked)
    refused = 0
    for number, reply in traced.items():
        assert reply.result.token_ids == alone[number].token_ids
        assert accepted_by_level(reply.rounds) == alone[number].accepted_by_level
        refused += sum(r.tree.path(r.emitted) != r.path for r in reply.rounds)
    # only this rule draws from the target's whole law after a refusal
    assert bool(refused) == (rule == "threshold")


def test_a_reply_that_ends_within_the_accepted_drafts():
    known = overfit("llama")
    asked = replace(requests(1)[0], max_new_tokens=64)
    ends = {token: position for position, token in reversed(list(enumerate(known.replies[0])))}
    cut = 0
    for token in [t for t, position in ends.items() if 0 < position < 40][:8]:
        ((_, reply),) = trace(engine(TREES["chain"]), [replace(asked, eos_ids=(token,))])
        last = reply.rounds[-1]
        assert last.emitted[-1] == token and len(last.path) <= len(last.emitted)
        assert [last.tree.tokens[row] for row in last.path] == last.emitted[: len(last.path)]
        cut += len(last.path) == len(last.emitted)
    assert cut


def test_replies_without_a_round_and_plain_ones():
    ((_, reply),) = trace(engine(TREES["tree"]), [replace(requests(1)[0], max_new_tokens=1)])
    assert reply.rounds == [] and len(reply.result.token_ids) == 1
    plain = Engine(overfit("llama").target, config=EngineConfig(graphs="off"))
    ((_, reply),) = trace(plain, requests(1))
    assert all(r.tree.parents == [-1] and r.path == [] and len(r.emitted) == 1 for r in reply.rounds)


def test_the_path_takes_children_only():
    """The same token under two parents, and one that stands under no accepted row."""
    tree = TracedTree([9, 1, 2, 1, 3], [-1, 0, 0, 2, 3], [0.0] * 5, [0.0] * 5)
    assert tree.path([2, 1, 3, 7]) == [2, 3, 4]
    assert tree.path([1, 3]) == [1] and tree.path([3]) == [] and tree.path([]) == []
