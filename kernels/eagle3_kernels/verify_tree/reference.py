"""The definition of verify_tree: the `match` rule. The output is a function of the target's tokens alone."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3_kernels.structures import Tree, Walk

# (slot, row, level) -> the target's token after that row
Choose = Callable[[int, int, int], int]


class Links(NamedTuple):
    """One slot's tree as host lists."""

    tokens: Sequence[int]
    first_child: Sequence[int]
    next_sibling: Sequence[int]


def verify_tree(tree: Tree, target: Tensor | Choose) -> Walk:
    """Follow, from each root, the child that equals the target's token; stop where there is none.

    Args:
        target: the target's token after each row [B, N], or a function that gives it and is asked only at the rows
            that the walk visits.
    """
    choose = _lookup(target) if isinstance(target, Tensor) else target
    fields = (tree.tokens.tolist(), tree.first_child.tolist(), tree.next_sibling.tolist())
    walks = [
        _walk_slot(slot, Links(*links), tree.depth, choose) for slot, links in enumerate(zip(*fields, strict=True))
    ]
    packed = torch.tensor(walks, dtype=torch.int32, device=tree.tokens.device).view(len(walks), tree.depth + 3)
    return Walk(path=packed[:, :-2], accepted=packed[:, -2], bonus=packed[:, -1])


def _lookup(target: Tensor) -> Choose:
    tokens = target.tolist()
    return lambda slot, row, level: tokens[slot][row]


def _walk_slot(slot: int, links: Links, depth: int, choose: Choose) -> list[int]:
    """Accepted rows (root first) padded to depth + 1, their number without the root, the token that follows them."""
    path, wanted = [0], choose(slot, 0, 0)
    for level in range(1, depth + 1):
        child = _matching_child(links, path[-1], wanted)
        if child < 0:
            break
        path.append(child)
        wanted = choose(slot, child, level)
    return [*path, *[-1] * (depth + 1 - len(path)), len(path) - 1, wanted]


def _matching_child(links: Links, row: int, wanted: int) -> int:
    """-1 where no child matches; bounded by the rows, so that broken links cannot hang a round."""
    child = links.first_child[row]
    for _ in range(len(links.tokens)):
        if child < 0 or links.tokens[child] == wanted:
            return child
        child = links.next_sibling[child]
    return -1
