"""Trees against brute force: catches orphans under ties, wrong masks past one word, siblings out of order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_kernels.bits import unpack_bits
from eagle3_kernels.build_tree import build_tree, link_tree
from eagle3_kernels.expand_level import expand_level, grow_mask
from eagle3_kernels.structures import Level, Tree
from oracles.drafted import draw_levels

quick = settings(max_examples=60, deadline=None, derandomize=True)
KINDS = ["random", "tied", "saturated", "all zero"]


def brute_force(levels: list[Level], nodes: int, slot: int) -> list[tuple[int, int, int]]:
    """(level, candidate, parent row) of each draft node, best first."""
    candidates = [
        (-float(score), depth, i)
        for depth, level in enumerate(levels, 1)
        for i, score in enumerate(level.scores[slot])
        if score > -torch.inf
    ]
    rows = {(0, -1): 0}
    chosen = []
    for _, depth, i in sorted(candidates)[:nodes]:
        above = (0, -1)
        if depth > 1:
            frontier_row = int(levels[depth - 1].parents[slot, i])
            above = (depth - 1, int(levels[depth - 2].chosen[slot, frontier_row]))
        chosen.append((depth, i, rows[above]))  # KeyError = a parent that was not selected
        rows[depth, i] = len(rows)
    return chosen


def check_links(tree: Tree, slot: int) -> None:
    """Every structure follows from the parents."""
    count, n = int(tree.count[slot]), tree.tokens.shape[1]
    parent = tree.parent[slot].tolist()
    assert parent[0] == -1
    assert tree.used_parents()[slot] == parent[:count]
    assert all(0 <= parent[row] < row for row in range(1, count))
    ancestors = {}
    for row in range(n):
        ancestors[row] = {row} | (ancestors[parent[row]] if parent[row] >= 0 else set())
        children = [c for c in range(count) if parent[c] == row and c > 0]
        linked, child = [], int(tree.first_child[slot, row])
        while child >= 0:
            linked.append(child)
            child = int(tree.next_sibling[slot, child])
        assert linked == children
        assert [float(tree.scores[slot, c]) for c in linked] == sorted(
            (tree.scores[slot, linked].tolist()), reverse=True
        )
    seen = unpack_bits(tree.ancestor_mask[slot], n)
    for row in range(n):
        assert set(seen[row].nonzero().flatten().tolist()) == ancestors[row]
        assert int(tree.position[slot, row]) == len(ancestors[row]) - 1
    assert parent[count:] == [-1] * (n - count)


@quick
@given(
    st.sampled_from(KINDS),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(2, 12),
    st.integers(1, 90),
    st.integers(0, 10**6),
)
def test_tree_is_the_best_nodes_of_all_candidates(kind, slots, depth, top_k, vocab, nodes, seed):
    levels = draw_levels(kind, slots, depth, top_k, vocab, seed)
    tree = build_tree(torch.arange(slots), levels, nodes)
    for slot in range(slots):
        expected = brute_force(levels, nodes, slot)
        assert int(tree.count[slot]) == len(expected) + 1
        assert int(tree.tokens[slot, 0]) == slot
        for row, (level, i, parent) in enumerate(expected, 1):
            assert int(tree.position[slot, row]) == level
            assert int(tree.parent[slot, row]) == parent
            assert int(tree.tokens[slot, row]) == int(levels[level - 1].tokens[slot, i])
        check_links(tree, slot)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "depth, top_k, nodes", [(1, 1, 1), (6, 1, 6), (1, 8, 3), (12, 8, 59), (10, 10, 130), (40, 1, 40)]
)
def test_trees_of_more_than_one_word(kind, depth, top_k, nodes):
    levels = draw_levels(kind, 2, depth, top_k, 40, seed=5)
    tree = build_tree(torch.zeros(2), levels, nodes)
    for slot in range(2):
        brute_force(levels, nodes, slot)
        check_links(tree, slot)
    if kind != "saturated":
        assert tree.count.tolist() == [nodes + 1] * 2


def test_chain_is_a_tree_of_one_child():
    tree = build_tree(torch.zeros(1), draw_levels("random", 1, 5, 1, 20, seed=0), nodes=5)
    assert tree.parent.tolist() == [[-1, 0, 1, 2, 3, 4]]
    assert tree.paths().tolist() == [[0, 1, 2, 3, 4, 5]]


def test_levels_that_a_slot_cannot_use_are_left_out():
    levels = draw_levels("random", 3, 4, 3, 20, seed=1)
    tree = build_tree(torch.zeros(3), levels, 20, max_level=torch.tensor([0, 1, 4]))
    assert tree.count.tolist() == [1, 4, 21]
    assert tree.position.amax(1).tolist()[:2] == [0, 1]
    for slot in range(3):
        check_links(tree, slot)


def test_more_children_than_tokens_are_clamped():
    level = expand_level(torch.zeros(1, 1, 3), torch.zeros(1, 1), k=8)
    assert level.tokens.tolist() == [[0, 1, 2]]
    assert level.chosen.tolist() == [[0, 1, 2]]


def test_ranking_keys_choose_children_and_weighed_edge_scores_count():
    keys = torch.tensor([[[-1.0, -2.0, -3.0]]])
    level = expand_level(-keys, torch.tensor([[-0.5]]), k=2, edge=lambda best: -best, weigh=lambda edges: 2 * edges)
    assert level.tokens.tolist() == [[2, 1]]
    assert level.edges.tolist() == [[-3.0, -2.0]]
    assert level.scores.tolist() == [[-6.5, -4.5]]
    assert level.frontier_tokens.tolist() == [[1, 2]]


@quick
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(0, 10**6))
def test_nodes_know_their_edge_and_what_drew_them(slots, depth, top_k, seed):
    """The source of a node is its parent's row among all frontiers; a limit keeps a prefix of the whole tree."""
    levels = draw_levels("random", slots, depth, top_k, 7, seed)
    tree = build_tree(torch.zeros(slots), levels, 40)
    limit = torch.randint(0, 9, (slots,), generator=torch.Generator().manual_seed(seed))
    limited = build_tree(torch.zeros(slots), levels, 40, limit=limit)
    assert tree.edges is not None and tree.source is not None and limited.source is not None
    frontiers = [[()], *([tuple(level.frontier_tokens[slot].tolist()) for slot in range(slots)] for level in levels)]
    for slot in range(slots):
        count = int(limited.count[slot])
        assert count == min(int(tree.count[slot]), 1 + int(limit[slot]))
        assert limited.tokens[slot, :count].tolist() == tree.tokens[slot, :count].tolist()
        assert limited.source[slot, count:].tolist() == [-1] * (tree.tokens.shape[1] - count)
        for row in range(1, int(tree.count[slot])):
            level, parent = int(tree.position[slot, row]), int(tree.parent[slot, row])
            first = 0 if level == 1 else 1 + sum(len(frontiers[i][slot]) for i in range(1, level - 1))
            at = int(tree.source[slot, row]) - first
            assert at == 0 if level == 1 else frontiers[level - 1][slot][at] == int(tree.tokens[slot, parent])
            step = tree.scores[slot, row] - tree.scores[slot, parent]
            torch.testing.assert_close(tree.edges[slot, row], step, rtol=1e-4, atol=1e-4)


def test_frontier_mask_is_the_ancestors_closure():
    generator = torch.Generator().manual_seed(0)
    mask, rows, ancestors = None, 0, [set()]
    for width in (3, 4, 4, 4, 4, 4, 4, 4, 4):
        parents = torch.randint(0, len(ancestors), (1, width), generator=generator)
        mask = grow_mask(mask, parents, rows)
        ancestors = [ancestors[int(p)] | {rows + i} for i, p in enumerate(parents[0])]
        rows += width
        seen = unpack_bits(mask[0], rows)
        assert [set(row.nonzero().flatten().tolist()) for row in seen] == ancestors


def test_paths_are_every_leafs_root_path():
    parent = torch.tensor([[-1, 0, 0, 1, 3, 1, -1]])
    tree = link_tree(torch.tensor([6]), torch.zeros(1, 7), parent, torch.zeros(1, 7), depth=3)
    assert tree.paths().tolist() == [[0, 2, -1, -1], [0, 1, 3, 4], [0, 1, 5, -1]]
    assert Tree.bare(torch.tensor([7])).paths().tolist() == [[0]]
