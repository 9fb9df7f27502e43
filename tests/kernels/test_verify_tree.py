"""The walk against all root paths; the accepted path's relocation and first draft step."""

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_kernels.build_tree import build_tree, link_tree
from eagle3_kernels.gather_first_step import gather_first_step
from eagle3_kernels.relocate_kv import relocate_kv
from eagle3_kernels.structures import Tree, Walk
from eagle3_kernels.verify_tree import match, verify_tree
from oracles.drafted import draw_levels

quick = settings(max_examples=60, deadline=None, derandomize=True)


def longest_match(tree: Tree, target: torch.Tensor, slot: int) -> list[int]:
    """The longest root path whose every token is the target's token at its parent."""
    best = [0]
    for leaf_path in tree.paths(slot).tolist():
        path = [0]
        for row in leaf_path[1:]:
            if row < 0 or int(tree.tokens[slot, row]) != int(target[slot, path[-1]]):
                break
            path.append(row)
        best = max(best, path, key=len)
    return best


@quick
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(1, 40), st.integers(0, 10**6))
def test_walk_follows_the_targets_tokens(slots, depth, top_k, nodes, seed):
    tree = build_tree(torch.zeros(slots), draw_levels("random", slots, depth, top_k, 4, seed), nodes)
    target = torch.randint(0, 4, tree.tokens.shape, generator=torch.Generator().manual_seed(seed))
    walk = verify_tree(tree, target)
    for slot in range(slots):
        path = longest_match(tree, target, slot)
        assert walk.path[slot].tolist() == path + [-1] * (tree.depth + 1 - len(path))
        assert int(walk.accepted[slot]) == len(path) - 1
        assert int(walk.bonus[slot]) == int(target[slot, path[-1]])


def test_bare_roots_accept_nothing():
    walk = verify_tree(Tree.bare(torch.tensor([5, 6])), torch.tensor([[8], [9]]))
    assert walk.path.tolist() == [[0], [0]]
    assert walk.bonus.tolist() == [8, 9]


def linked(first_child: list[int], next_sibling: list[int], tokens: list[int], depth: int) -> Tree:
    """A tree of one slot with any links, legal or not."""
    bare = Tree.bare(torch.tensor([0]))
    links = {"tokens": tokens, "first_child": first_child, "next_sibling": next_sibling}
    return dataclasses.replace(bare, depth=depth, **{name: torch.tensor([row]) for name, row in links.items()})


def always_nine(slot: int, row: int, level: int, children: list[int]) -> tuple[int, int]:
    return match(9, children)


def test_walk_ends_on_broken_links():
    """A sibling ring that never matches accepts nothing; a row that is its own child is accepted depth times."""
    ring = linked([1, -1, -1], [-1, 2, 1], [0, 1, 2], depth=3)
    assert [x.tolist() for x in verify_tree(ring, always_nine)] == [[[0, -1, -1, -1]], [0], [9]]
    own_child = linked([1, 1], [-1, -1], [0, 9], depth=4)
    assert [x.tolist() for x in verify_tree(own_child, always_nine)] == [[[0, 1, 1, 1, 1]], [4], [9]]


def test_only_visited_rows_are_asked():
    """Two slots of one tree: each is asked along its own path, row and level."""
    parent = torch.tensor([[-1, 0, 0, 1, 2]] * 2)
    tree = link_tree(torch.tensor([5, 5]), torch.tensor([[9, 4, 6, 6, 8]] * 2), parent, torch.zeros(2, 5), 2)
    answers = {(0, 0, 0): 6, (0, 2, 1): 5, (1, 0, 0): 4, (1, 1, 1): 6, (1, 3, 2): 1}
    asked = {}

    def decide(slot: int, row: int, level: int, children: list[int]) -> tuple[int, int]:
        asked[slot, row, level] = children
        return match(answers[slot, row, level], children)

    walk = verify_tree(tree, decide)
    assert list(asked) == list(answers)
    assert list(asked.values()) == [[4, 6], [8], [4, 6], [6], []]
    assert walk.path.tolist() == [[0, 2, -1], [0, 1, 3]]
    assert (walk.accepted.tolist(), walk.bonus.tolist()) == ([1, 2], [5, 1])


@quick
@given(st.integers(1, 3), st.integers(1, 6), st.integers(0, 10**6))
def test_relocation_equals_a_copy(slots, depth, seed):
    """Sources and destinations overlap; pages are scattered; key and value dims and layer groups differ."""
    generator = torch.Generator().manual_seed(seed)
    page, per_slot = 4, 6
    table = torch.randperm(slots * per_slot, generator=generator).view(slots, per_slot)
    pools = [
        torch.randn(layers, slots * per_slot, page, 2, dim, generator=generator)
        for layers, dim in ((3, 5), (3, 2), (1, 7))
    ]
    lens = torch.randint(0, 8, (slots,), generator=generator)
    path = torch.full((slots, depth + 1), -1)
    for slot in range(slots):
        accepted = int(torch.randint(0, depth + 1, (1,), generator=generator))
        rows = torch.randperm(15, generator=generator)[:accepted].sort().values + 1
        path[slot, : accepted + 1] = torch.cat([torch.zeros(1, dtype=torch.int64), rows])
    before = [pool.clone() for pool in pools]
    relocate_kv(pools, table, lens, path)
    for pool, old in zip(pools, before, strict=True):
        for slot in range(slots):
            rows = old[:, table[slot]].flatten(1, 2)
            expected, length = rows.clone(), int(lens[slot])
            for i, row in enumerate(path[slot].tolist()):
                if row >= 0:
                    expected[:, length + i] = rows[:, length + row]
            assert torch.equal(pool[:, table[slot]].flatten(1, 2), expected)


def test_first_step_pairs_each_feature_with_the_next_token():
    tree = build_tree(torch.tensor([50, 60]), draw_levels("random", 2, 3, 2, 30, seed=3), 8)
    row, child = int(tree.first_child[0, 0]), None
    child = int(tree.first_child[0, row])
    path = torch.tensor([[0, row, child, -1], [0, -1, -1, -1]], dtype=torch.int32)
    walk = Walk(path, torch.tensor([2, 0], dtype=torch.int32), torch.tensor([77, 88], dtype=torch.int32))
    step = gather_first_step(tree, walk, starts=torch.tensor([0, 9]))
    assert step.count.tolist() == [3, 1]
    assert step.rows[0, :3].tolist() == [0, row, child]
    assert step.tokens[0, :3].tolist() == [int(tree.tokens[0, row]), int(tree.tokens[0, child]), 77]
    assert (int(step.rows[1, 0]), int(step.tokens[1, 0])) == (9, 88)
    # padding stays inside the buffer
    assert step.rows[1].tolist() == [9] * 4
