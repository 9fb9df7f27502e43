"""The definition of verify_tree: walk from the root while a rule accepts one of the node's children."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3_kernels.structures import Tree, Walk

# (slot, row, level, tokens of the row's children) -> (the child that is accepted or -1, the target's token there)
Decide = Callable[[int, int, int, list[int]], tuple[int, int]]


class Links(NamedTuple):
    """One slot's tree as host lists."""

    tokens: Sequence[int]
    first_child: Sequence[int]
    next_sibling: Sequence[int]

    def children(self, row: int) -> list[int]:
        """Best first; bounded by the rows, so that broken links cannot hang a round."""
        found, child = [], self.first_child[row]
        while child >= 0 and len(found) < len(self.tokens):
            found.append(child)
            child = self.next_sibling[child]
        return found


def verify_tree(tree: Tree, target: Tensor | Decide) -> Walk:
    """Follow, from each root, the child that the rule accepts; stop where there is none.

    Args:
        target: the target's token after each row [B, N], which the `match` rule compares with the children; or a rule
            of its own, asked only at the rows that the walk visits and in the order of the walk. Its token is that of
            the accepted child, or what is emitted in place of all children.
    """
    decide = _matching(target) if isinstance(target, Tensor) else target
    fields = (tree.tokens.tolist(), tree.first_child.tolist(), tree.next_sibling.tolist())
    walks = [
        _walk_slot(slot, Links(*links), tree.depth, decide) for slot, links in enumerate(zip(*fields, strict=True))
    ]
    packed = torch.tensor(walks, dtype=torch.int32, device=tree.tokens.device).view(len(walks), tree.depth + 3)
    return Walk(path=packed[:, :-2], accepted=packed[:, -2], bonus=packed[:, -1])


def match(token: int, children: list[int]) -> tuple[int, int]:
    """The `match` rule: the child that equals the target's token; the output depends on the target alone."""
    return (children.index(token) if token in children else -1), token


def _matching(target: Tensor) -> Decide:
    tokens = target.tolist()
    return lambda slot, row, level, children: match(tokens[slot][row], children)


def _walk_slot(slot: int, links: Links, depth: int, decide: Decide) -> list[int]:
    """Accepted rows (root first) padded to depth + 1, their number without the root, the token that follows them."""
    path, token = [0], 0
    for level in range(depth + 1):
        rows = links.children(path[-1]) if level < depth else []
        which, token = decide(slot, path[-1], level, [links.tokens[row] for row in rows])
        if which < 0:
            break
        path.append(rows[which])
    return [*path, *[-1] * (depth + 1 - len(path)), len(path) - 1, token]
