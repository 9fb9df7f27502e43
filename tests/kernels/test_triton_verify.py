"""verify_tree in Triton: the match walk against its reference, the rejection rules against exact walks in float64.

The exact walk draws the same coins and noise; where one of its decisions is nearer than MARGIN to the other side,
rounding may decide, and the slot is left out (a test fails if that is not rare).
"""

# pyright: reportArgumentType=false, reportCallIssue=false
import dataclasses
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from eagle3_kernels.build_tree import link_tree
from eagle3_kernels.dispatch import set_kernels
from eagle3_kernels.sample_nodes import Purpose, sample_rows, uniforms, vocabulary_gumbel
from eagle3_kernels.structures import Tree, Walk
from eagle3_kernels.testing import device, poisoned
from eagle3_kernels.verify_tree import REJECTION, TARGET_ONLY, THRESHOLD, kernel, reference
from eagle3_kernels.verify_tree import verify_sampled as public_sampled
from eagle3_kernels.verify_tree import verify_tree as public_tree
from eagle3_kernels.verify_tree.rules import sequential_law, threshold_choice

MARGIN = 1e-5
quick = settings(max_examples=12, deadline=None, derandomize=True)


def moved(item: Any, to: torch.device | str) -> Any:
    """A tree or tensor on another device."""
    if isinstance(item, Tensor):
        return item.to(to)
    fields = {x.name: getattr(item, x.name) for x in dataclasses.fields(item)}
    return dataclasses.replace(item, **{name: x.to(to) for name, x in fields.items() if isinstance(x, Tensor)})


def grown(slots: int, rows: int, depth: int, tokens: int, draw: torch.Generator, wide: bool = False) -> Tree:
    """Random trees on the CPU, some slots smaller; rows are drawn by their parent's law; siblings may repeat."""
    parents, levels = torch.full((slots, rows), -1), torch.zeros(slots, rows, dtype=torch.int64)
    count = torch.randint(1, rows + 1, (slots,), generator=draw)
    count[0] = rows
    for slot in range(slots):
        for row in range(1, int(count[slot])):
            above = (levels[slot, :row] < depth).nonzero().flatten()
            pick = 0 if wide else int(torch.randint(len(above), (1,), generator=draw))
            parents[slot, row] = above[pick]
            levels[slot, row] = levels[slot, above[pick]] + 1
    labels = torch.randint(tokens, (slots, rows), generator=draw)
    return link_tree(count, labels, parents, torch.zeros(slots, rows), depth, source=parents)


def same(ours: Walk, wanted: Walk) -> bool:
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(ours, wanted, strict=True))


# match


@quick
@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 6), st.integers(1, 5), st.integers(0, 10**6))
def test_match_is_the_references(slots, rows, depth, tokens, seed):
    draw = torch.Generator().manual_seed(seed)
    tree = grown(slots, rows, depth, tokens, draw)
    # -1: sample_nodes' mark
    target = torch.randint(-1, tokens, (slots, rows), generator=draw)
    wanted = reference.verify_tree(tree, target)
    for each in (target, target.int()):
        with poisoned():
            ours = kernel.verify_tree(moved(tree, device()), each.to(device()))
        assert same(ours, wanted)
        assert [x.dtype for x in ours] == [torch.int32] * 3


def test_match_walks_chains_and_bare_roots():
    bare = moved(Tree.bare(torch.tensor([5, 6])), device())
    assert [x.tolist() for x in kernel.verify_tree(bare, torch.tensor([[8], [-1]], device=device()))] == [
        [[0], [0]],
        [0, 0],
        [8, -1],
    ]
    chain = link_tree(
        torch.tensor([5]), torch.tensor([[9, 1, 2, 3, 4]]), torch.tensor([[-1, 0, 1, 2, 3]]), torch.zeros(1, 5), 4
    )
    for accepted in range(5):
        target = torch.tensor([[1, 2, 3, 4, 7]])
        target[0, accepted] = 7
        walk = kernel.verify_tree(moved(chain, device()), target.to(device()))
        assert walk.path.tolist() == [[*range(accepted + 1), *[-1] * (4 - accepted)]]
        assert (walk.accepted.tolist(), walk.bonus.tolist()) == ([accepted], [7])
    none = kernel.verify_tree(moved(grown(1, 3, 2, 4, torch.Generator()), device()), torch.zeros(1, 3).to(device()))
    assert none.path.shape == (1, 3)


# rejection rules


class Case(NamedTuple):
    """A round on the CPU: what verify_sampled takes."""

    tree: Tree
    p: Tensor
    seeds: Tensor
    positions: Tensor
    q: Tensor | None
    target_ids: Tensor | None
    threshold: float
    greedy: Tensor | None

    def walk(self, rule: str, by: Any) -> Walk:
        at = "cpu" if by is reference.verify_sampled else device()
        on = [moved(x, at) if isinstance(x, (Tensor, Tree)) else x for x in self]
        return by(*on[:4], rule, *on[4:])


def case(
    rule: str,
    slots: int,
    rows: int,
    depth: int,
    vocab: int = 40,
    seed: int = 0,
    wide: bool = False,
    same_law: float = 0,
) -> Case:
    """Random laws with zeros; drafts of the rejection rule come from a smaller vocabulary in any order.

    Args:
        same_law: how far p goes towards q; 1 = p is q.
    """
    draw = torch.Generator().manual_seed(seed)
    size = vocab if same_law else max(2, vocab // 2)
    target_ids = torch.randperm(vocab, generator=draw)[:size]
    tree = grown(slots, rows, depth, size if rule == REJECTION else vocab, draw, wide)
    p = (torch.randn(slots, rows, vocab, generator=draw) * 1.5).softmax(-1)
    q = (torch.randn(slots, rows, size, generator=draw) * 1.5).softmax(-1)
    p, q = (x.where(torch.rand(x.shape, generator=draw) > 0.1, 0) for x in (p, q))
    q = q / q.sum(-1, keepdim=True)
    if rule == REJECTION:
        tree = dataclasses.replace(tree, tokens=target_ids[tree.tokens.long()].int())
        p = torch.lerp(p, torch.zeros_like(p).index_copy_(2, target_ids, q), same_law) if same_law else p
    p = p / p.sum(-1, keepdim=True)
    seeds = torch.randint(2**32, (slots,), generator=draw)
    positions = torch.randint(10**5, (slots,), generator=draw)
    drawn = (q, target_ids) if rule == REJECTION else (None, None)
    return Case(tree, p, seeds, positions, *drawn, 0.05, None)


class Exact(NamedTuple):
    """A walk in float64, and how near its nearest decision was to the other side."""

    path: list[int]
    bonus: int
    margin: float


def source(tree: Tree, slot: int, row: int) -> int:
    assert tree.source is not None
    return int(tree.source[slot, row])


def exact_walk(given_case: Case, rule: str, slot: int) -> Exact:
    tree, p, seeds, positions, q, target_ids, threshold, greedy = given_case
    seed, vocab, path, margin = int(seeds[slot]), p.shape[-1], [0], 1.0
    while True:
        row, position = path[-1], int(positions[slot]) + len(path)
        children = [r for r in range(tree.tokens.shape[1]) if tree.parent[slot, r] == row]
        tokens = [int(tree.tokens[slot, r]) for r in children]
        law, purpose, which = p[slot, row].double(), Purpose.TARGET, -1
        if rule == THRESHOLD:
            which = threshold_choice(law, tokens, threshold)
            margin = min([margin, *(abs(float(law[x]) - threshold) for x in tokens)])
        elif children:
            drawn = None
            if q is not None:
                drawn = torch.zeros(vocab, dtype=torch.float64)
                drawn[target_ids] = q[slot, source(tree, slot, children[0])].double()
            node = sequential_law(law, tokens, drawn)
            coins = uniforms(seed, Purpose.ACCEPT, position, len(tokens), "cpu").double()
            hits = (coins < node.accept).nonzero().flatten().tolist()
            which, purpose, law = (hits[0] if hits else -1), Purpose.RESIDUAL, node.residual
            seen = slice(0, which + 1) if hits else slice(None)
            sure = (node.accept == 0) | (node.accept == 1)
            margin = min([margin, *(coins - node.accept).abs().where(~sure, 1)[seen].tolist()])
        if which < 0:
            break
        path.append(children[which])
    calm = greedy is not None and bool(greedy[slot])
    scores = law.log() + (0 if calm else vocabulary_gumbel(seed, purpose, position, vocab, p.device))
    best = scores.topk(2).values
    # equal shares without noise tie exactly, and the lowest id wins
    gap = 1.0 if calm else float(best[0] - best[1])
    return Exact(path, int(scores.argmax()), min(margin, gap))


def agree(given_case: Case, rule: str, walk: Walk) -> int:
    """Slots that were compared with the exact walk."""
    compared = 0
    for slot, (path, accepted, bonus) in enumerate(zip(*(x.tolist() for x in walk), strict=True)):
        exact = exact_walk(given_case, rule, slot)
        if exact.margin > MARGIN:
            compared += 1
            assert path == exact.path + [-1] * (given_case.tree.depth + 1 - len(exact.path))
            assert (accepted, bonus) == (len(exact.path) - 1, exact.bonus)
    return compared


RULES = (TARGET_ONLY, REJECTION, THRESHOLD)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks and chunks of small vocabularies."""
    for name, value in {"BLOCK": 16, "DRAW_BLOCK": 8, "PROGRAMS": 6}.items():
        monkeypatch.setattr(kernel, name, value)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "slots, rows, depth, wide", [(3, 1, 0, False), (3, 9, 4, False), (2, 24, 2, True), (2, 60, 6, False)]
)
def test_walks_are_exact(rule, slots, rows, depth, wide):
    """The kernel's and the reference's; nodes with one child and with twenty."""
    made = case(rule, slots, rows, depth, wide=wide)
    with poisoned():
        ours = made.walk(rule, kernel.verify_sampled)
    assert agree(made, rule, ours) == slots
    assert agree(made, rule, made.walk(rule, reference.verify_sampled)) == slots
    assert [x.dtype for x in ours] == [torch.int32] * 3


@pytest.mark.full
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("rule", RULES)
def test_many_keys_on_one_small_tree_decide_by_the_law(rule):
    """60 coins and noises on the same five tokens: every outcome of the rule occurs, each where the law puts it."""
    one = case(rule, 1, 4, 2, vocab=5, seed=3)
    many = [None if x is None else x.expand(60, *x.shape[1:]).contiguous() for x in (one.p, one.q)]
    tree = dataclasses.replace(
        one.tree,
        **{
            x.name: getattr(one.tree, x.name).repeat(60, *[1] * (getattr(one.tree, x.name).dim() - 1))
            for x in dataclasses.fields(one.tree)
            if isinstance(getattr(one.tree, x.name), Tensor)
        },
    )
    made = one._replace(
        tree=tree, p=many[0], q=many[1], seeds=torch.full((60,), 9), positions=torch.arange(60), threshold=0.25
    )
    walk = made.walk(rule, kernel.verify_sampled)
    assert agree(made, rule, walk) >= 59
    assert len(set(zip(walk.accepted.tolist(), walk.bonus.tolist(), strict=True))) > 3


class Recorder:
    """A kernel that keeps the arguments of its last launch."""

    def __init__(self, launched: Any):
        self.launched, self.arguments = launched, {}

    def __getitem__(self, grid: Any):
        def launch(*values: Any, **named: Any) -> None:
            self.arguments = dict(zip(self.launched.arg_names, values, strict=False))
            self.launched[grid](*values, **named)

        return launch


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("rule", [TARGET_ONLY, REJECTION])
def test_what_is_left_after_rejections_is_the_residual(rule, monkeypatch):
    """Keys are chosen so that all of five children are rejected, repeated ones among them; the law is compared, too."""
    made = case(rule, 3, 6, 1, vocab=30, wide=True, seed=4)
    for slot in range(3):
        q = torch.zeros(30)
        if made.q is not None:
            q[made.target_ids] = made.q[slot, 0]
        # those that the draft likes far more than the target, so that none is sure to be accepted
        a, b = (q - 4 * made.p[slot, 0]).topk(2).indices.tolist()
        # one that it cannot draw: skipped, and it keeps its share
        c = int((made.p[slot, 0] - 10 * q).argmax())
        made.tree.tokens[slot, 1:] = torch.tensor([a, b, a, c, b])
        wanted = c if rule == REJECTION and slot == 0 else None
        walks = (exact_walk(made, rule, slot) for made.positions[slot] in range(2000))
        assert next(
            walk for walk in walks if walk.path == [0] and walk.margin > MARGIN and wanted in (None, walk.bonus)
        )
    chunk, end = (Recorder(getattr(kernel.sampled_kernel, name)) for name in ("draw_chunk", "draw_end"))
    monkeypatch.setattr(kernel.sampled_kernel, "draw_chunk", chunk)
    monkeypatch.setattr(kernel.sampled_kernel, "draw_end", end)
    assert agree(made, rule, made.walk(rule, kernel.verify_sampled)) == 3
    for slot in range(3):
        tokens = made.tree.tokens[slot, made.tree.parent[slot] == 0].tolist()
        q = torch.zeros(30)
        if made.q is not None:
            q[made.target_ids] = made.q[slot, 0]
        wanted = sequential_law(made.p[slot, 0].double(), tokens, None if made.q is None else q.double()).residual
        a, b = chunk.arguments["scales"][slot].tolist()
        residual = (a * made.p[slot, 0] - b * q).clamp(min=0)
        apart, share = chunk.arguments["apart_in"][slot].long().cpu(), end.arguments["share_in"][slot].cpu()
        assert set(apart[apart >= 0].tolist()) == set(tokens)
        assert len(apart[apart >= 0]) == len(set(tokens))
        residual[apart[apart >= 0]] = share[apart >= 0]
        assert torch.allclose(residual / residual.sum(), wanted.float(), atol=1e-5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("same_law", [0.999, 0.5])
def test_a_good_draft_is_walked_exactly(same_law):
    """p near q: what is left after a rejection is the difference of nearly equal numbers."""
    made = case(REJECTION, 3, 9, 3, same_law=same_law, seed=5)
    assert agree(made, REJECTION, made.walk(REJECTION, kernel.verify_sampled)) >= 2


@pytest.mark.usefixtures("small_blocks")
def test_a_perfect_draft_is_accepted():
    """p is q: the first child always, so every walk ends at a leaf."""
    made = case(REJECTION, 3, 9, 3, same_law=1.0, seed=6)
    assert made.q is not None and made.target_ids is not None
    q = (made.q + 0.01) / (made.q + 0.01).sum(-1, keepdim=True)
    walk = made._replace(q=q, p=torch.zeros_like(made.p).index_copy_(2, made.target_ids, q)).walk(
        REJECTION, kernel.verify_sampled
    )
    for slot, accepted in enumerate(walk.accepted.tolist()):
        first = 0
        for row in walk.path[slot, 1 : accepted + 1].tolist():
            assert row == int(made.tree.first_child[slot, first])
            first = row
        assert int(made.tree.first_child[slot, first]) == -1


def chain_of_two(tokens: list[int], p: list[list[float]], **fields: Any) -> Case:
    """A root with children; the law after the root and after each of them."""
    rows = len(tokens) + 1
    parent = torch.tensor([[-1] + [0] * len(tokens)])
    tree = link_tree(
        torch.tensor([rows]), torch.tensor([[0, *tokens]]), parent, torch.zeros(1, rows), 2, source=parent.clamp(min=0)
    )
    keys = torch.tensor([3])
    return Case(tree, torch.tensor([p + p[-1:] * (rows - len(p))]), keys, keys, None, None, 0.0, None)._replace(
        **fields
    )


def test_a_greedy_law_is_walked_as_by_match():
    """One-hot p: the child on it is accepted whatever the coin, and it is emitted whatever the noise."""
    sure = [[0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    q, ids = torch.full((1, 1, 3), 1 / 3), torch.tensor([3, 2, 1])
    for tokens, path, bonus in (([3, 2], [0, 2, -1], 1), ([2, 2], [0, 1, -1], 1), ([3, 1], [0, -1, -1], 2)):
        for rule, drawn in ((TARGET_ONLY, {}), (REJECTION, {"q": q, "target_ids": ids})):
            made = chain_of_two(tokens, sure, **drawn)
            for by in (kernel.verify_sampled, reference.verify_sampled):
                walk = made.walk(rule, by)
                assert walk.path.tolist() == [path]
                assert walk.bonus.tolist() == [bonus]


@pytest.mark.usefixtures("small_blocks")
def test_threshold_takes_the_likeliest_child_and_greedy_slots_hear_no_noise():
    p = [[0.1, 0.4, 0.4, 0.1], [0.3, 0.3, 0.2, 0.2]]
    for tokens, threshold, path, greedy in (
        ([3, 2, 1], 0.4, [0, 2, -1], True),
        ([3, 0], 0.11, [0, -1, -1], True),
        ([3, 0], 0.0, [0, 1, -1], False),
    ):
        made = chain_of_two(tokens, p, threshold=threshold, greedy=torch.tensor([greedy]))
        for by in (kernel.verify_sampled, reference.verify_sampled):
            walk = made.walk(THRESHOLD, by)
            assert walk.path.tolist() == [path]
            if greedy:
                # equals go to the lowest id
                assert walk.bonus.tolist() == [0 if path[1] > 0 else 1]
    flat = chain_of_two([3], [[0.0, *[1 / 99] * 99]] * 2, threshold=0.5, greedy=torch.tensor([True]))
    for by in (kernel.verify_sampled, reference.verify_sampled):
        assert flat.walk(THRESHOLD, by).bonus.tolist() == [1]
    calm = case(THRESHOLD, 3, 6, 2, seed=8)._replace(greedy=torch.tensor([True, False, True]))
    assert agree(calm, THRESHOLD, calm.walk(THRESHOLD, kernel.verify_sampled)) == 3


@pytest.mark.parametrize("rule", RULES)
def test_a_row_that_is_not_finite_is_marked_where_a_walk_ends_on_it(rule):
    """A softmax over bad logits is NaN everywhere; no child is accepted there."""
    made = case(rule, 2, 3, 2, seed=1)
    made.p[0, 0] = torch.nan
    for by in (kernel.verify_sampled, reference.verify_sampled):
        walk = made.walk(rule, by)
        assert (walk.path[0].tolist(), int(walk.accepted[0]), int(walk.bonus[0])) == ([0, -1, -1], 0, -1)
        assert int(walk.bonus[1]) >= 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 0.0])
def test_a_bare_root_without_a_law_is_marked(bad):
    keys = torch.tensor([3])
    made = Case(Tree.bare(keys), torch.full((1, 1, 9), bad), keys, keys, None, None, 0.0, None)
    for by in (kernel.verify_sampled, reference.verify_sampled):
        assert made.walk(TARGET_ONLY, by).bonus.tolist() == [-1]


def test_without_children_the_draw_is_sample_nodes_own():
    """So that plain rounds and drafted ones emit alike."""
    vocab = 50
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(2)) * 2
    tree, keys = Tree.bare(torch.zeros(4)), torch.arange(4)
    made = Case(tree, logits.softmax(-1)[:, None], keys, keys + 7, None, None, 0.0, None)
    wanted = sample_rows(logits, torch.ones(4), keys, keys + 8).tolist()
    for rule, by in itertools.product((TARGET_ONLY, THRESHOLD), (kernel.verify_sampled, reference.verify_sampled)):
        assert made.walk(rule, by).bonus.tolist() == wanted


@quick
@given(
    st.sampled_from(RULES),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(2, 60),
    st.integers(0, 10**6),
)
def test_any_round_is_exact(rule, slots, rows, depth, vocab, seed):
    made = case(rule, slots, rows, depth, vocab, seed)
    with pytest.MonkeyPatch.context() as patch, poisoned():
        for name, value in {"BLOCK": 32, "DRAW_BLOCK": 16, "PROGRAMS": 4}.items():
            patch.setattr(kernel, name, value)
        walk = made.walk(rule, kernel.verify_sampled)
    agree(made, rule, walk)


def test_arguments_are_checked():
    made = case(TARGET_ONLY, 1, 3, 2)
    with pytest.raises(ValueError, match="rule 'match'; it must be one of target_only, rejection, threshold"):
        made.walk("match", public_sampled)
    with pytest.raises(ValueError, match="rejection needs q, target_ids"):
        made.walk(REJECTION, public_sampled)
    with pytest.raises(ValueError, match="target_only looks at no q"):
        case(REJECTION, 1, 3, 2).walk(TARGET_ONLY, public_sampled)


def test_the_public_ops_choose_the_kernel(monkeypatch):
    made, chosen = case(TARGET_ONLY, 2, 5, 2), []
    for name in ("verify_tree", "verify_sampled"):
        monkeypatch.setattr(kernel, name, lambda *args, name=name: chosen.append(name))
    set_kernels("triton")
    try:
        public_tree(made.tree, torch.zeros(2, 5))
        made.walk(TARGET_ONLY, public_sampled)
        # a rule of its own is asked on the host
        public_tree(made.tree, lambda slot, row, level, children: (-1, 0))
    finally:
        set_kernels(None)
    assert chosen == ["verify_tree", "verify_sampled"]


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", [1, 3, 24, 60, 130])
@pytest.mark.parametrize("vocab", [33, 600])
@pytest.mark.parametrize("wide", [False, True])
def test_grid(rule, rows, vocab, wide, monkeypatch):
    monkeypatch.setattr(kernel, "BLOCK", 64)
    monkeypatch.setattr(kernel, "DRAW_BLOCK", 64)
    compared = 0
    for seed in range(4):
        made = case(rule, 2, rows, 6, vocab, seed, wide)
        compared += agree(made, rule, made.walk(rule, kernel.verify_sampled))
        target = torch.randint(-1, vocab, made.tree.tokens.shape)
        ours = kernel.verify_tree(moved(made.tree, device()), target.to(device()))
        assert same(ours, reference.verify_tree(made.tree, target))
    assert compared >= 7
