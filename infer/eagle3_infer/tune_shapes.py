"""Which tree promises most tokens per second: what the head offered is counted once, what rows cost measured once, and
every shape predicted from the two. Knows counts and seconds, nothing of models.

A tree with smaller depth, top_k or nodes holds nodes of the widest one alone (but for paths that the wide one's
frontier had crowded out), so one wide draft below every token of some replies tells of every shape which of its drafts
would have been accepted. Replies are the target's own whatever is drafted; a walk over them is a run of the engine.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eagle3_infer.config import TreeConfig
from eagle3_infer.costs import CostModel, row_tiers

# trees whose nodes differ by no more than this factor are alike
UNLIKE = 1.5
# nodes that a tree would need for what it never holds
_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Root:
    """All candidates below one token, best first as `build_tree` orders them.

    Args:
        parents: row of each row's parent, -1 at the root, which is row 0.
        path: rows of the tokens that followed in the reply, as far as they were offered one below the other.
    """

    parents: Sequence[int]
    path: Sequence[int]


class Offers:
    """What was offered below every token of some replies but the last of each.

    Args:
        replies: roots of each reply, in its order.
        depth: levels that were drafted.
    """

    def __init__(self, replies: Sequence[Sequence[Root]], depth: int):
        self.lengths = [len(reply) for reply in replies]
        roots = [root for reply in replies for root in reply]
        width = max((len(root.parents) for root in roots), default=1)
        # [R, N]; the level of an unused row is one that no tree has
        self.parents = np.zeros((len(roots), width), np.int64)
        self.levels = np.full((len(roots), width), depth + 1)
        self.siblings = np.zeros((len(roots), width), np.int64)
        # [R, D]; 0 where the reply's token was not offered
        self.path = np.zeros((len(roots), depth), np.int64)
        for at, root in enumerate(roots):
            used = len(root.parents)
            self.parents[at, 1:used] = root.parents[1:]
            self.levels[at, :used], self.siblings[at, :used] = _places(root.parents)
            self.path[at, : len(root.path)] = root.path[:depth]

    @property
    def tokens(self) -> int:
        """Emitted in rounds: all but the first of each reply."""
        return sum(self.lengths)


def _places(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Level of each row, and how many better siblings it has."""
    levels, siblings, children = [0], [0], [0] * len(parents)
    for parent in parents[1:]:
        levels.append(levels[parent] + 1)
        siblings.append(children[parent])
        children[parent] += 1
    return levels, siblings


class NodesNeeded:
    """For one top_k: which rows a tree of any depth could hold, and how many nodes it needs for each accepted path."""

    def __init__(self, offers: Offers, top_k: int):
        self.offers = offers
        self._offered = np.zeros(offers.levels.shape, bool)
        frontier = offers.levels == 0
        for level in range(1, offers.path.shape[1] + 1):
            below = np.take_along_axis(frontier, offers.parents, 1)
            here = below & (offers.levels == level) & (offers.siblings < top_k)
            self._offered |= here
            # rows are best first: a level expands its first ones
            frontier = here & (here.cumsum(1) <= top_k)

    def at_depth(self, depth: int) -> np.ndarray:
        """Nodes with which a tree of so many levels holds the reply's first, second, ... next tokens [R, depth]."""
        offers = self.offers
        held = self._offered & (offers.levels <= depth)
        place = np.where(held, held.cumsum(1), _NEVER)
        path = offers.path[:, :depth]
        return np.where(path > 0, np.take_along_axis(place, path, 1), _NEVER)


def count_rounds(accepted: Sequence[int], lengths: Iterable[int]) -> int:
    """Rounds that a run over the replies takes.

    Args:
        accepted: drafts that a round from each root accepts, reply after reply [R]; the round's own token comes on top.
        lengths: roots of each reply.
    """
    rounds = start = 0
    for length in lengths:
        at = 0
        while at < length:
            at += accepted[start + at] + 1
            rounds += 1
        start += length
    return rounds


class Prediction(NamedTuple):
    """What a tree promises; `tau` is counted, not estimated."""

    tree: TreeConfig
    tau: float
    tokens_per_second: float


def shapes(most: TreeConfig) -> Iterator[TreeConfig]:
    """Trees up to the depth, top_k and nodes of `most` that differ in what they hold.

    Every depth; of top_k and nodes those of `row_tiers` and the most: what lies between is close to one of them.
    """
    for depth in range(1, most.depth + 1):
        yield TreeConfig.chain(depth)
        for top_k in sorted({*row_tiers(most.top_k), most.top_k} - {1}):
            largest = min(most.nodes, top_k + top_k**2 * (depth - 1))
            for nodes in sorted({*row_tiers(largest), largest}):
                # with fewer nodes than children a narrower tree is the same; one level is full or the same as one
                if max(depth, top_k) <= nodes and (depth > 1 or nodes == top_k):
                    yield TreeConfig(depth, top_k, nodes)


def round_seconds(tree: TreeConfig, tau: float, cost: CostModel, slots: int) -> float:
    """A round of `slots` requests that draft and verify such trees."""
    draft = cost.draft(max(1, round(slots * tau)), slots * tree.top_k, tree.depth)
    return cost.verify(slots * (tree.nodes + 1)) + draft + cost.rest(slots, drafted=True)


def predict(offers: Offers, cost: CostModel, slots: int, most: TreeConfig) -> list[Prediction]:
    """Every shape's tau and tokens per second, fastest first.

    Args:
        slots: requests that run at once.
        most: bounds of the search; `offers` were drafted with its depth and top_k.
    """
    found, needed = [], {}
    for tree in shapes(most):
        if tree.top_k not in needed:
            needed[tree.top_k] = NodesNeeded(offers, tree.top_k)
        accepted = (needed[tree.top_k].at_depth(tree.depth) <= tree.nodes).sum(1).tolist()
        rounds = count_rounds(accepted, offers.lengths)
        tau = offers.tokens / rounds if rounds else 1.0
        found.append(Prediction(tree, tau, slots * tau / round_seconds(tree, tau, cost, slots)))
    return sorted(found, key=lambda each: -each.tokens_per_second)


def finalists(predictions: Sequence[Prediction], count: int) -> list[Prediction]:
    """The most promising shapes, of two or more a chain among them, no two with about as many nodes.

    What is close in nodes is close in speed; timing those would tell nothing new, and a wrong guess of what rows cost
    is seen in unlike ones.
    """
    chosen: list[Prediction] = []
    for each in predictions:
        if len(chosen) < count and all(_unlike(each.tree.nodes, other.tree.nodes) for other in chosen):
            chosen.append(each)
    chain = next((each for each in predictions if each.tree.top_k == 1), None)
    if count > 1 and chain is not None and all(each.tree.top_k > 1 for each in chosen):
        chosen[count - 1 :] = [chain]
    return chosen


def _unlike(nodes: int, others: int) -> bool:
    return max(nodes, others) > UNLIKE * min(nodes, others)


def around(tree: TreeConfig, most: TreeConfig) -> TreeConfig:
    """An adaptive tree that may be that one, smaller, or somewhat larger within `most`."""
    depth, top_k = min(most.depth, tree.depth + 2), max(tree.top_k, min(2, most.top_k))
    nodes = min(most.nodes, 2 * tree.nodes, top_k + top_k**2 * (depth - 1))
    return TreeConfig(depth, top_k, max(nodes, depth), adaptive=True)


def at_bounds(tree: TreeConfig, most: TreeConfig) -> list[str]:
    """Which of depth, top_k and nodes are the largest that were looked at."""
    return [name for name in ("depth", "top_k", "nodes") if getattr(tree, name) == getattr(most, name)]
