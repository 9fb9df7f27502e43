"""Oracle 4: every rule keeps the target's law, to 1e-9, by running every outcome; rules known to be wrong do not.

What each negative test keeps wrong: p/q on drafts that were not sampled, a residual drawn from p, one random number
for acceptance and residual, a duplicate that counts twice, siblings out of the order of their draws, a tree pruned by
its sampled tokens' scores, a threshold.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from eagle3_kernels.verify_tree import verify_tree
from eagle3_kernels.verify_tree.rules import NodeLaw, sequential_law, threshold_choice
from oracles.exact import (
    Dice,
    Grown,
    Model,
    Rule,
    Shape,
    as_tree,
    distance,
    draw_children,
    emit,
    emitted,
    law_of,
    try_children,
)

EXACT, WRONG = 1e-9, 1e-3


def laws(vocab: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs (p, q): random, with zeros, equal, without common support, each of them sure."""
    draw = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(2, vocab, dtype=torch.float64, generator=draw) * 1.5).softmax(-1)
    half = torch.arange(vocab) % 2
    first, last = torch.eye(vocab, dtype=torch.float64)[[0, -1]]
    near = q + 1e-9 * (p - q)
    pairs = [(p, q), (p, p), (p * half, q), (p, q * half), (p * half, q * (1 - half)), (first, q), (p, last), (near, q)]
    return [(a / a.sum(), b / b.sum()) for a, b in pairs]


def as_dict(p: Tensor) -> dict[Hashable, float]:
    return dict(enumerate(p.tolist()))


def one_token(p: Tensor, q: Tensor, count: int, rule: Rule) -> dict[Hashable, float]:
    """Law of a node's token when `count` children are sampled from q without replacement."""
    return law_of(lambda dice: emit(dice, rule(p, draw_children(dice, q, count), q)))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("vocab", [3, 4, 6])
def test_recursive_rejection_keeps_the_law_of_sampled_siblings(vocab, count):
    for p, q in laws(vocab, seed=count):
        assert distance(one_token(p, q, count, sequential_law), as_dict(p)) < EXACT


@pytest.mark.parametrize("vocab", [3, 4])
def test_target_only_keeps_the_law_of_any_siblings(vocab):
    """All sequences of up to three children, duplicates and impossible ones among them."""
    for p, _ in laws(vocab, seed=9):
        for count in range(4):
            for children in product(range(vocab), repeat=count):
                law = sequential_law(p, children)
                assert distance(as_dict(emitted(law)), as_dict(p)) < EXACT


def test_the_closed_form_is_the_enumerated_one():
    """Oracle of the oracle."""
    law = sequential_law(laws(5, 0)[0][0], [3, 1, 3, 0])
    assert distance(law_of(lambda dice: emit(dice, law)), as_dict(emitted(law))) < EXACT


# depth 2

# (prefix, levels) -> a tree drafted below the prefix
Draft = Callable[[Dice, tuple[int, ...], int], Grown]


def value_free(draft: Model, shape: Shape) -> Draft:
    """Draws all of a tree before anything is verified; its shape knows no tokens."""

    def grow(dice: Dice, prefix: tuple[int, ...], levels: int, shape: Shape = shape) -> Grown:
        if not levels:
            return []
        tokens = draw_children(dice, draft[prefix], len(shape))
        pairs = zip(tokens, shape[: len(tokens)], strict=True)
        return [(token, grow(dice, (*prefix, token), levels - 1, below)) for token, below in pairs]

    return grow


def one_round(
    dice: Dice, target: Model, draft: Model, rule: Rule, grow: Draft, before: tuple[int, ...]
) -> tuple[int, ...]:
    """Drafts and walks once; all tokens so far, two at most."""
    tree, paths = as_tree(grow(dice, before, 2 - len(before)))

    def decide(slot: int, row: int, level: int, children: list[int]) -> tuple[int, int]:
        prefix = (*before, *paths[row])
        # the rest is trimmed
        if len(prefix) == 2:
            return -1, 0
        law = rule(target[prefix], children, draft[prefix])
        index = try_children(dice, law)
        return index, children[index] if index >= 0 else dice(law.residual.tolist())

    walk = verify_tree(tree, decide)
    return (*before, *paths[int(walk.path[0, int(walk.accepted)])], int(walk.bonus))[:2]


def two_tokens(dice: Dice, target: Model, draft: Model, rule: Rule, grow: Draft) -> tuple[int, ...]:
    """Rounds until two tokens are emitted."""
    emitted: tuple[int, ...] = ()
    while len(emitted) < 2:
        emitted = one_round(dice, target, draft, rule, grow, emitted)
    return emitted


def joint_error(grow: Callable[[Model], Draft], rule: Rule = sequential_law, vocab: int = 3) -> float:
    """How far the law of the first two tokens is from the target's."""
    target, draft = Model(vocab, seed=1), Model(vocab, seed=2)
    return distance(law_of(lambda dice: two_tokens(dice, target, draft, rule, grow(draft))), target.joint())


SHAPES: dict[str, Shape] = {
    "chain": (((),),),
    "two of one": (((),), ((),)),
    "first child has two": (((), ()), ()),
    "second child has two": ((), ((), ())),
    "two of two": (((), ()), ((), ())),
    "three children": ((), ((),), ()),
}


@pytest.mark.parametrize("name", SHAPES)
def test_trees_of_two_levels_keep_the_joint_law(name):
    assert joint_error(lambda draft: value_free(draft, SHAPES[name])) < EXACT


def expand_the_likelier(draft: Model) -> Draft:
    """Two children; below the one that the draft finds likelier, two more: a node's own draws decide nothing of it."""

    def grow(dice: Dice, prefix: tuple[int, ...], levels: int) -> Grown:
        q = draft[prefix]
        tokens = draw_children(dice, q, 2)
        best = max(tokens, key=lambda x: float(q[x]))
        return [
            (x, [(y, []) for y in draw_children(dice, draft[(*prefix, x)], 2)] if x == best and levels == 2 else [])
            for x in tokens
        ]

    return grow


def test_which_nodes_are_expanded_may_look_at_their_tokens():
    assert joint_error(expand_the_likelier) < EXACT


def prune_to_the_best(draft: Model) -> Draft:
    """Two children of one each, of which the two nodes with the best path scores stay, as with top-k drafts."""
    grow = value_free(draft, SHAPES["two of one"])

    def pruned(dice: Dice, prefix: tuple[int, ...], levels: int) -> Grown:
        grown = grow(dice, prefix, levels)
        score = {(x,): float(draft[prefix][x]) for x, _ in grown}
        score |= {(x, y): score[x,] * float(draft[(*prefix, x)][y]) for x, below in grown for y, _ in below}
        kept = sorted(score, key=lambda path: -score[path])[:2]
        return [(x, [(y, []) for y, _ in below if (x, y) in kept]) for x, below in grown if (x,) in kept]

    return pruned


def test_a_sampled_tree_pruned_by_its_tokens_scores_is_biased():
    """Why sampled trees have a shape that knows no tokens."""
    assert joint_error(prune_to_the_best) > WRONG


def one_draw_per_level(draft: Model, fixed: bool) -> Draft:
    """Two children of one each. A level's nodes share their noise, so that equal laws draw equal tokens.

    Not fixed: the second node keeps its child only where the first node's child (equal to it) leaves room, as one
    does below which the filtered draft finds fewer tokens than the tree has places.
    """
    draft.laws |= {(x,): draft[[0]] for x in range(3)}

    def grow(dice: Dice, prefix: tuple[int, ...], levels: int) -> Grown:
        first, second = draw_children(dice, draft[prefix], 2)
        [token] = draw_children(dice, draft[[0]], 1)
        below = [(token, [])] if levels == 2 else []
        return [(first, below), (second, below if fixed or token == 0 else [])]

    return grow


def test_shared_noise_is_harmless_in_a_fixed_shape_only():
    """Why a child that the draft cannot draw keeps its place."""
    assert joint_error(lambda draft: one_draw_per_level(draft, fixed=True)) < EXACT
    assert joint_error(lambda draft: one_draw_per_level(draft, fixed=False)) > WRONG


# rules known to be wrong

P, Q = (torch.tensor(x, dtype=torch.float64) for x in ([0.45, 0.25, 0.2, 0.1], [0.2, 0.5, 0.05, 0.25]))


def error_of(law: dict[Hashable, float]) -> float:
    return distance(law, as_dict(P))


def test_the_examples_are_fair():
    """The right rule has no error where the wrong ones have."""
    assert all(error_of(one_token(P, Q, count, sequential_law)) < EXACT for count in (1, 2, 3))


@pytest.mark.parametrize("count", [1, 2])
def test_p_over_q_on_top_k_drafts_is_biased(count):
    best = Q.topk(count).indices.tolist()
    assert error_of(as_dict(emitted(sequential_law(P, best, Q)))) > WRONG


def test_a_residual_drawn_from_p_is_biased():
    def wrong(p: Tensor, children: Sequence[int], q: Tensor) -> NodeLaw:
        return sequential_law(p, children, q)._replace(residual=p)

    assert error_of(one_token(P, Q, 1, wrong)) > WRONG
    assert error_of(as_dict(emitted(sequential_law(P, [1])._replace(residual=P)))) > WRONG


def same_number_twice(p: Tensor, q: Tensor) -> Tensor:
    """Law of one draft that u accepts, where the same u, by the residual's distribution function, draws otherwise."""
    total = torch.zeros_like(p)
    for x, share in enumerate(q.tolist()):
        law = sequential_law(p, [x], q)
        accept = float(law.accept[0])
        ends = law.residual.cumsum(0).clamp(min=accept)
        total += share * ends.diff(prepend=torch.tensor([accept], dtype=p.dtype))
        total[x] += share * accept
    return total


def test_one_random_number_for_acceptance_and_residual_is_biased():
    law = same_number_twice(P, Q)
    assert float(law.sum()) == pytest.approx(1)
    assert error_of(as_dict(law)) > WRONG


def test_a_duplicate_that_counts_twice_is_biased():
    """Tried again with p as it was: its probability is counted on top."""

    def wrong(p: Tensor, children: Sequence[int]) -> NodeLaw:
        residual = p.clone()
        residual[list(children)] = 0
        return NodeLaw(p[list(children)], residual / residual.sum(), children)

    assert error_of(as_dict(emitted(sequential_law(P, [1, 1])))) < EXACT
    assert error_of(as_dict(emitted(wrong(P, [1, 1])))) > WRONG


def test_siblings_out_of_the_order_of_their_draws_are_biased():
    def wrong(p: Tensor, children: Sequence[int], q: Tensor) -> NodeLaw:
        return sequential_law(p, sorted(children, key=lambda x: -float(q[x])), q)

    assert error_of(one_token(P, Q, 2, wrong)) > WRONG


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_threshold_rule_is_biased(count):
    """LOSSY, and labelled so: a child that reaches the threshold is taken as if it were sure."""

    def program(dice: Dice) -> int:
        children = draw_children(dice, Q, count)
        index = threshold_choice(P, children, 0.2)
        return children[index] if index >= 0 else dice(P.tolist())

    assert error_of(law_of(program)) > WRONG


# the match rule, for any noise

NOISES: dict[str, Callable[[torch.Generator], Tensor]] = {
    "gumbel": lambda draw: -(-torch.rand(3, 5, generator=draw).log()).log(),
    "none": lambda draw: torch.zeros(3, 5),
    "whole numbers": lambda draw: torch.randint(-2, 3, (3, 5), generator=draw).float(),
    "one token always": lambda draw: torch.tensor([0, 0, 1e30, 0, 0]).expand(3, 5),
    "drowns the target": lambda draw: -1e4 * torch.rand(3, 5, generator=draw),
}


def target_draw(target: Model, noise: Tensor, prefix: tuple[int, ...]) -> int:
    """The target's token after a prefix, a function of noise [positions, V] and prefix alone."""
    return int((target[prefix].log().float() + noise[len(prefix)]).argmax())


def matched(target: Model, noise: Tensor, drafts: list[list[int]]) -> tuple[tuple[int, ...], int]:
    """Three tokens by rounds of the match rule, and how many were accepted; drafts are the same for all parents."""
    emitted, accepted = (), 0
    while len(emitted) < 3:
        grown: Grown = []
        for tokens in reversed(drafts[len(emitted) :]):
            grown = [(token, grown) for token in tokens]
        tree, paths = as_tree(grown)
        tokens = [target_draw(target, noise, (*emitted, *path)) for path in paths]
        walk = verify_tree(tree, torch.tensor([tokens]))
        emitted = (*emitted, *paths[int(walk.path[0, int(walk.accepted)])], int(walk.bonus))
        accepted += int(walk.accepted)
    return emitted, accepted


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("shared", [False, True])
def test_the_match_rule_emits_plains_tokens_for_any_noise(kind, shared):
    """100 tables of target, noise and drafts for two positions; with shared noise the drafts have seen it."""
    targets, hits = [Model(5, seed) for seed in range(5)], 0
    for seed in range(100):
        draw = torch.Generator().manual_seed(seed)
        target, noise = targets[seed % 5], NOISES[kind](draw)
        plain = ()
        while len(plain) < 3:
            plain = (*plain, target_draw(target, noise, plain))
        keys = torch.randn(2, 5, generator=draw) + (noise[:2] if shared else 0)
        emitted, accepted = matched(target, noise, keys.topk(1 + seed % 3).indices.tolist())
        assert emitted == plain
        hits += accepted
    assert hits > 20
