"""The definition of verify_tree: the `match` rule. The output is a function of the target's tokens alone."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eagle3_kernels.structures import Tree, Walk


def verify_tree(tree: Tree, target: Tensor) -> Walk:
    """Follow, from each root, the child that equals the target's token; stop where there is none.

    Args:
        target: the target's token after each row [B, N].
    """
    chosen, links = target.tolist(), (tree.tokens.tolist(), tree.first_child.tolist(), tree.next_sibling.tolist())
    walks = [
        walk_slot(tokens, first, sibling, tree.depth, chosen[b].__getitem__)
        for b, (tokens, first, sibling) in enumerate(zip(*links, strict=True))
    ]
    padded = [path + [-1] * (tree.depth + 1 - len(path)) for path, _ in walks]
    make = {"dtype": torch.int32, "device": tree.tokens.device}
    return Walk(
        path=torch.tensor(padded, **make),
        accepted=torch.tensor([len(path) - 1 for path, _ in walks], **make),
        bonus=torch.tensor([bonus for _, bonus in walks], **make),
    )


def walk_slot(
    tokens: Sequence[int],
    first_child: Sequence[int],
    next_sibling: Sequence[int],
    depth: int,
    choose: Callable[[int], int],
) -> tuple[list[int], int]:
    """One slot's walk: accepted rows (root first) and the token that follows them.

    `choose(row)` is the target's token after a row; it is asked only at rows that the walk visits.
    """
    path, wanted = [0], choose(0)
    for _ in range(depth):
        child = _matching_child(tokens, first_child[path[-1]], next_sibling, wanted)
        if child < 0:
            break
        path.append(child)
        wanted = choose(child)
    return path, wanted


def _matching_child(tokens: Sequence[int], child: int, next_sibling: Sequence[int], wanted: int) -> int:
    # bounded by the rows, so that broken links cannot hang a round
    for _ in range(len(tokens)):
        if child < 0 or tokens[child] == wanted:
            break
        child = next_sibling[child]
    return child
