"""Rounds of fixed shapes are the engine's other rounds, run by run: same runs, same trees, same pools (fp32).

Catches what padding, buckets, compaction and buffers that are never cleared can do to a neighbour or a later round.
"""

from collections import Counter
from functools import lru_cache
from typing import Any

import pytest
import torch

from eagle3.errors import Eagle3Error
from eagle3_infer.config import EngineConfig, RuleConfig, SamplingConfig, TreeConfig
from eagle3_infer.drafter import Draft
from eagle3_infer.engine import Engine, Request, Result
from eagle3_infer.fixed_buffers import Buffers, Shape
from eagle3_infer.fixed_verify import FixedVerifier
from eagle3_infer.graphs import Backend
from eagle3_infer.metrics import HostClock
from eagle3_kernels.build_tree import build_tree
from eagle3_kernels.expand_level import expand_level
from eagle3_kernels.sample_nodes import Purpose, mixed_gumbel, mixed_ids
from eagle3_kernels.sample_nodes.noise import keyed_gumbel
from oracles.captured import FakeGraphs
from oracles.invariants import CheckedEngine, KnowingHead, random_head, shifted_target
from oracles.overfit import greedy, random_prompts

CHAIN, TREE, WIDE = TreeConfig.chain(3), TreeConfig(depth=4, top_k=3, nodes=12), TreeConfig(2, 7, 40)
SAMPLED, SHARED = SamplingConfig(0.8, seed=3), RuleConfig(draft_noise="shared")
# of five requests: they leave one by one, others join, one is left
LENGTHS = (12, 4, 18, 8, 6)
NEW = max(LENGTHS)


class World:
    """A target, five prompts, and a head that knows most of the first one's reply."""

    def __init__(self, family: str):
        self.target = shifted_target(family)
        first, *rest = random_prompts(self.target, 4)
        self.prompts = [first, first, *rest]
        self.reply = greedy(self.target, first, NEW)
        self.head = KnowingHead(random_head(self.target), first + self.reply, share=0.8)

    def requests(self, sampling: SamplingConfig | list[SamplingConfig] | None = None, **more: Any) -> list[Request]:
        each = sampling if isinstance(sampling, list) else [sampling or SamplingConfig()] * len(self.prompts)
        return [
            Request(prompt, each[i], max_new_tokens=LENGTHS[i], prompt_id=i, **more)
            for i, prompt in enumerate(self.prompts)
        ]


@lru_cache(maxsize=4)
def world(family: str = "llama") -> World:
    return World(family)


class FixedEngine(CheckedEngine):
    """Checks its pools after every round, and counts the rounds of each kind by bucket."""

    def __init__(self, *args, backend: Backend | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.backend, self.rounds = backend, Counter()

    def _graphs(self) -> Backend | None:
        return self.backend

    def _verify_fixed(self, clock, fixed):
        self.rounds[fixed._bucket(len(self.running))] += 1
        return super()._verify_fixed(clock, fixed)

    def _verify(self, clock, chunks):
        self.rounds["prompt" if chunks else "other"] += 1
        return super()._verify(clock, chunks)

    def _draft_fixed(self, clock, fixed):
        self.rounds["drafted"] += 1
        super()._draft_fixed(clock, fixed)

    def _draft(self, clock):
        self.rounds["drafted by host"] += bool(self.running)
        super()._draft(clock)


def told(results: list[Result]) -> list[tuple]:
    return [
        (r.token_ids, r.finish_reason, r.run_lengths, r.nodes, r.offered_by_level, r.accepted_by_level, r.path_conflict)
        for r in results
    ]


def compare(requests, tree, slots=1, rule=None, family="llama", backend: FakeGraphs | None = None) -> FixedEngine:
    """Both kinds of rounds give the same; the engine of the fixed ones is returned."""
    w = world(family)
    head = w.head if tree else None
    plain = Engine(w.target, head, tree, EngineConfig(slots=slots, page_size=8), rule)
    config = EngineConfig(slots=slots, page_size=8, head_page_size=4, graphs="fixed")
    engine = FixedEngine(w.target, head, tree, config, rule, backend=backend)
    engine.prepare(requests)
    captures = backend.captures if backend else 0
    results, expected = engine.generate(requests), plain.generate(requests)
    # no request waits for a capture
    assert backend is None or backend.captures == captures
    assert told(results) == told(expected)
    for ours, theirs in zip(results, expected, strict=True):
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None:
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    return engine


def fixed_rounds(engine: FixedEngine) -> int:
    return sum(count for kind, count in engine.rounds.items() if isinstance(kind, int))


@pytest.mark.parametrize("slots, tree", [(1, CHAIN), (1, TREE), (3, TREE), (4, CHAIN), (4, WIDE), (4, None)])
def test_greedy(slots, tree):
    engine = compare(world().requests(), tree, slots)
    assert not engine.rounds["other"]
    # those who are left at the end run in smaller buckets
    assert {1, slots} <= {kind for kind in engine.rounds if isinstance(kind, int)} <= {1, 2, slots}
    # but for the prompts' own rounds
    assert tree is None or 0 < engine.rounds["drafted by host"] <= engine.rounds["prompt"] + 1
    assert fixed_rounds(engine) > (5 if slots == 1 or tree is None else 3)


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3", "gpt_oss"])
def test_soft_caps_windows_sinks_and_unequal_widths(family):
    compare(world(family).requests(), TREE, slots=3, family=family)


@pytest.mark.parametrize(
    "rule, tree, slots, sampling",
    [
        (None, TREE, 3, SAMPLED),
        (None, CHAIN, 2, SamplingConfig(1.3, min_p=0.1, seed=5)),
        (None, None, 4, SAMPLED),
        (SHARED, TREE, 3, SAMPLED),
        # greedy rows beside sampled ones of several temperatures
        (SHARED, TREE, 4, [SamplingConfig(t, seed=7) for t in (0.0, 0.5, 0.0, 1.0, 0.9)]),
    ],
)
def test_sampled_on_the_device(rule, tree, slots, sampling):
    """What the match rule draws there is what it draws on the host, and the noise steers the drafts alike."""
    engine = compare(world().requests(sampling), tree, slots, rule)
    assert not engine.rounds["other"]
    assert fixed_rounds(engine)


@pytest.mark.parametrize(
    "rule, more",
    [
        (None, {"logprobs": True}),
        (None, {"forced": (5, 6, 7, 8, 9)}),
        (None, {"sampling": SamplingConfig(0.8, top_k=20, top_p=0.9, seed=3)}),
        (None, {"sampling": SamplingConfig(0.0, repetition_penalty=1.4, bad_words=((5, 6), (7,)))}),
        (RuleConfig("target_only"), {"sampling": SAMPLED}),
        (RuleConfig("threshold", threshold=0.1), {"sampling": SAMPLED}),
    ],
)
def test_what_the_device_does_not_decide_is_decided_between_the_graphs(rule, more):
    engine = compare(world().requests(**more), TREE, 3, rule)
    assert not engine.rounds["other"]
    assert fixed_rounds(engine)


@pytest.mark.parametrize(
    "rule, sampling", [(RuleConfig("rejection"), SAMPLED), (SHARED, SamplingConfig(0.8, top_k=20, seed=3))]
)
def test_drafts_that_are_drawn_from_laws_are_the_hosts(rule, sampling):
    """And the device's when those who need it have left: the features change hands both ways."""
    engine = compare(world().requests(sampling), TREE, 3, rule)
    assert engine.rounds["drafted by host"]
    assert not engine.rounds["drafted"]
    # walks of trees with fewer levels leave nothing of earlier ones behind them
    assert engine.fixed is not None
    walk = engine.fixed.verifier.walk
    assert rule is SHARED or all(
        path[1 + accepted :] == [-1] * (4 - accepted)
        for path, accepted in zip(walk.path.tolist(), walk.accepted.tolist(), strict=True)
    )
    mixed = [SamplingConfig(), sampling, SamplingConfig(), SamplingConfig(), SamplingConfig()]
    engine = compare(world().requests(mixed), TREE, 5, rule)
    assert engine.rounds["drafted by host"]
    assert engine.rounds["drafted"]


@pytest.mark.parametrize("tree", [CHAIN, TREE])
def test_stops_inside_runs(tree):
    """EOS ids among the reply's tokens end some requests in the middle of a run while others go on."""
    reply = world().reply
    for token in dict.fromkeys(reply[2:5]):
        compare(world().requests(eos_ids=(token,)), tree, 3)


def test_a_cancelled_request_leaves_its_row_to_the_others():
    w = world()
    engine = FixedEngine(w.target, w.head, TREE, EngineConfig(slots=3, page_size=8, graphs="fixed"))
    tokens: dict[int, list[int]] = {}
    for update in engine.stream(Request(p, max_new_tokens=NEW, prompt_id=i) for i, p in enumerate(w.prompts[1:4])):
        tokens.setdefault(update.number, []).extend(update.token_ids)
        if update.number == 0 and len(tokens[0]) > 3:
            engine.cancel(0)
    alone = Engine(w.target).generate([Request(p, max_new_tokens=NEW) for p in w.prompts[1:4]])
    assert 3 < len(tokens[0]) < NEW
    assert tokens[0] == alone[0].token_ids[: len(tokens[0])]
    assert [tokens[1], tokens[2]] == [alone[1].token_ids, alone[2].token_ids]
    assert {2, 3} <= set(engine.rounds)


def test_larger_requests_and_errors_leave_an_engine_as_new():
    """Pools that are made anew bring new buffers; those that stay keep theirs, with whatever lies in them."""
    w = world()
    engine = FixedEngine(w.target, w.head, TREE, EngineConfig(slots=2, page_size=8, graphs="fixed"))
    engine.generate([Request(w.prompts[0], max_new_tokens=4)])
    small = engine.fixed
    assert engine.generate_one(Request(w.prompts[0], max_new_tokens=4)).token_ids == w.reply[:4]
    assert engine.fixed is small
    assert engine.generate_one(Request(w.prompts[0], max_new_tokens=NEW)).token_ids == w.reply
    assert engine.fixed is not small

    def interrupt(index, result):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([Request(p, max_new_tokens=n) for p, n in zip(w.prompts, (4, NEW), strict=False)], interrupt)
    assert engine.generate_one(Request(w.prompts[0], max_new_tokens=NEW)).token_ids == w.reply


@pytest.mark.parametrize("tree", [TreeConfig.chain(6), TREE])
def test_padding_needs_more_rows_than_small_requests(tree):
    w = world()
    engine = FixedEngine(w.target, w.head, tree, EngineConfig(slots=4, page_size=1, graphs="fixed"))
    requests = [Request([token], max_new_tokens=3) for token in (7, 8, 9)]
    assert told(engine.generate(requests)) == told(Engine(w.target, w.head, tree).generate(requests))
    assert engine.rounds[4]


class Spoilt:
    """A module whose output is NaN from its n-th call on."""

    def __init__(self, calls: int):
        self.left = calls

    def __call__(self, module, args, output):
        self.left -= 1
        return output if self.left >= 0 else output * torch.nan


@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED])
def test_logits_that_are_not_finite_end_the_run(sampling):
    """No token of them is emitted, and the message says whose they are."""
    w = world()
    [expected] = Engine(w.target).generate([Request(w.prompts[0], sampling, max_new_tokens=NEW)])
    # the target runs once a round, the head once a level
    for module, whose, calls in ((w.target.lm_head, "target", 3), (w.head.lm_head, "head", 6)):
        engine = FixedEngine(w.target, w.head, TREE, EngineConfig(page_size=8, graphs="fixed"))
        emitted: list[int] = []
        updates = engine.stream([Request(w.prompts[0], sampling, max_new_tokens=NEW)])
        hook = module.register_forward_hook(Spoilt(calls))
        try:
            with pytest.raises(Eagle3Error, match=f"the {whose}'s logits are not finite in float32"):
                emitted.extend(token for update in updates for token in update.token_ids)
        finally:
            hook.remove()
        assert fixed_rounds(engine) > 1
        assert 0 < len(emitted) < NEW
        assert emitted == expected.token_ids[: len(emitted)]


@pytest.mark.parametrize(
    "tree, slots, rule, sampling",
    [
        (TREE, 3, None, None),
        (CHAIN, 2, SHARED, SAMPLED),
        (TREE, 2, RuleConfig("target_only"), SAMPLED),
        (None, 3, None, None),
    ],
)
def test_rounds_are_graphs(tree, slots, rule, sampling):
    """A replay does what was captured, op by op, on the same addresses; warm-up runs leave what one run leaves."""
    compare(world().requests(sampling), tree, slots, rule, backend=(graphs := FakeGraphs()))
    # verify and draft; where the host decides, the verification is two
    halves = 1 if tree is None else 3 if rule and rule.rule == "target_only" else 2
    # buckets of 1, 2 and 3, or of 1 and 2
    assert graphs.captures == halves * slots
    assert graphs.replays > graphs.captures


def test_the_host_waits_once_a_round(monkeypatch):
    """To read what was accepted; clocks are looked at when that has happened, but for the round that ends a request."""
    w, reads, waits = world(), [0], []

    class Noting(HostClock):
        """Knows whether the device may still be at work: whether the host has read since the last mark."""

        def mark(self):
            self.marked = reads[0]
            return super().mark()

        def settle(self):
            waits.append(self.marked == reads[0])

    read = FixedVerifier._read
    monkeypatch.setattr(FixedVerifier, "_read", lambda *args: reads.append(reads.pop() + 1) or read(*args))
    monkeypatch.setattr("eagle3_infer.metrics.clock_for", Noting)
    engine = Engine(w.target, w.head, TREE, EngineConfig(page_size=8, graphs="fixed"))
    result = engine.generate_one(Request(w.prompts[0], max_new_tokens=NEW))
    assert result.token_ids == w.reply
    assert reads == [result.rounds]
    # the prompt's round is timed like the others
    assert waits == [False] * result.rounds + [True]
    assert min(result.seconds[stage] for stage in ("prefill", "verify", "draft")) > 0


def test_padded_trees_are_trees():
    """Trees of another path, smaller than the buffers and fewer: the rest are bare roots."""
    target, shape = world().target, Shape(3, 9)
    buffers = Buffers(target, slots=4, shapes=[shape], layers=())
    draw = torch.Generator().manual_seed(0)
    scores, levels = torch.zeros(2, 1), []
    for _ in range(2):
        log_q = torch.randn(*scores.shape, 20, generator=draw).log_softmax(-1)
        levels.append(expand_level(log_q, scores, 2))
        scores = levels[-1].frontier_scores
    small = build_tree(torch.tensor([7, 8]), levels, nodes=5, max_level=torch.tensor([2, 1]))
    # what an earlier round left
    for part in (buffers.trees[shape].tokens, buffers.trees[shape].ancestor_mask, buffers.trees[shape].parent):
        part.fill_(9)
    buffers.load(shape, small)
    tree = buffers.tree(shape, 4)
    assert tree.count.tolist() == [6, 3, 1, 1]
    for slot in range(2):
        assert torch.equal(tree.paths(slot), small.paths(slot))
        rows = int(small.count[slot])
        for name in ("tokens", "position", "ancestor_mask", "first_child", "next_sibling", "scores", "edges"):
            assert torch.equal(getattr(tree, name)[slot, :rows], getattr(small, name)[slot, :rows]), name
        assert tree.position[slot, rows:].sum() == 0
    rows = torch.arange(10)
    alone = (1 << rows).int()
    assert torch.equal(tree.ancestor_mask[2, :, 0], alone)
    assert torch.equal(tree.ancestor_mask[1, 3:, 0], alone[3:])
    assert (tree.first_child[2:] == -1).all()
    assert (tree.parent[2:] == -1).all()
    assert tree.scores[:, 0].tolist() == [0] * 4
    assert (tree.scores[2:, 1:] == -torch.inf).all()


def test_keys_on_the_device_make_the_same_noise():
    seeds, positions = [0, 1, 2**31, 2**32 - 1, 123456789], [0, 5, 2**31 - 1, 77, 1000]
    mixed = mixed_ids(torch.arange(50))
    found = keyed_gumbel(torch.tensor(seeds), Purpose.TARGET, torch.tensor(positions), mixed)
    rows = [mixed_gumbel(s, Purpose.TARGET, p, mixed) for s, p in zip(seeds, positions, strict=True)]
    assert torch.equal(found, torch.stack(rows))


@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED])
def test_adaptive_trees_are_verified_in_a_few_sizes(sampling):
    """The host drafts them, of any size; a plain round has a size of its own, and so has what it leaves unread."""
    w = world()
    tree = TreeConfig(4, 3, 12, adaptive=True)
    graphs = FakeGraphs()
    engine = FixedEngine(w.target, w.head, tree, EngineConfig(slots=3, page_size=8, graphs="fixed"), backend=graphs)
    found = engine.generate(requests := w.requests(sampling))
    assert [r.token_ids for r in found] == [r.token_ids for r in Engine(w.target).generate(requests)]
    assert fixed_rounds(engine)
    assert not engine.rounds["other"]
    assert engine.fixed is not None
    assert [shape.nodes for shape in engine.fixed.shapes] == [0, 1, 3, 6, 12]
    assert graphs.replays


def test_padding_does_not_pass_the_bound_on_rows():
    """A controller that may verify few rows gets no more of them by padding."""
    w = world()
    tree = TreeConfig(4, 3, 12, adaptive=True)
    engine = FixedEngine(w.target, w.head, tree, EngineConfig(slots=3, page_size=8, graphs="fixed"))
    engine.generate_one(Request(w.prompts[0], max_new_tokens=2))
    fixed, two = engine.fixed, [None, None]
    assert fixed is not None
    for nodes, fits in ((0, True), (1, True), (3, False)):
        draft = Draft(fixed.buffers.tree(Shape(4 if nodes else 0, nodes), 2))
        assert fixed.verifies(draft, two, most_rows=4) == fits  # pyright: ignore[reportArgumentType]
        assert fixed.verifies(draft, two)  # pyright: ignore[reportArgumentType]
