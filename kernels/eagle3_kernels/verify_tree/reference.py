"""The definition of verify_tree: walk from the root while a rule accepts one of the node's children."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3_kernels.sample_nodes import Purpose, uniforms, vocabulary_gumbel
from eagle3_kernels.structures import Tree, Walk
from eagle3_kernels.verify_tree.rules import THRESHOLD, decide, sequential_law, threshold_choice

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


def verify_sampled(
    tree: Tree,
    p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    rule: str,
    q: Tensor | None = None,
    target_ids: Tensor | None = None,
    threshold: float = 0.0,
    greedy: Tensor | None = None,
) -> Walk:
    """`verify_tree` by target_only, rejection or threshold, with everything that they ask on the device.

    Where the walk ends for want of an accepted child, the token is drawn from the residual (target_only, rejection);
    where there is no child, and by threshold, from p with the target's own noise, as sample_nodes draws it.

    Args:
        p: the target's law after every tree row, after temperature and filters [B, N, V] fp32; one-hot at
            temperature 0 (but for threshold, see greedy).
        seeds: of each slot's request, int64 [B]; positions: absolute position of each slot's root, int64 [B].
        q: the laws that drew the drafts [B, rows, Vd] fp32, in the order of Tree.source, over the draft's vocabulary;
            target_ids: target id of every draft id [Vd]. For rejection, and no other rule.
        threshold: least p of a child that is accepted.
        greedy: bool [B]: slots that take the largest p, without noise, where they draw from it; None = no slot. By
            threshold their p is that of temperature 1.
    Returns:
        A bonus of -1 where the walk ends on a row of p that is not finite or empty: see sample_nodes.check_tokens.
    Raises:
        ValueError: an unknown rule; rejection without q, target_ids and Tree.source, another rule with q.
    """
    at, seed_of = positions.tolist(), seeds.tolist()
    calm = [False] * len(at) if greedy is None else greedy.tolist()

    def choose(slot: int, row: int, level: int, children: list[int]) -> tuple[int, int]:
        law, seed, position = p[slot, row].float(), seed_of[slot], at[slot] + level + 1
        which, purpose, residual = -1, Purpose.TARGET, law
        if rule == THRESHOLD:
            which = threshold_choice(law, children, threshold)
        elif children:
            node = sequential_law(law, children, _drawn_by(tree, q, target_ids, slot, row, len(law)))
            # without noise: only whether a child is accepted is asked here
            coins = uniforms(seed, Purpose.ACCEPT, position, len(children), law.device)
            which, _ = decide(node, coins, torch.zeros_like(law))
            purpose, residual = Purpose.RESIDUAL, node.residual
        if which >= 0:
            return which, children[which]
        noise = 0.0 if calm[slot] else vocabulary_gumbel(seed, purpose, position, len(law), law.device)
        return -1, int((residual.log() + noise).argmax()) if 0 < law.sum() < torch.inf else -1

    return verify_tree(tree, choose)


def _drawn_by(
    tree: Tree, q: Tensor | None, target_ids: Tensor | None, slot: int, row: int, vocab_size: int
) -> Tensor | None:
    """The law [V] over target ids that drew the children of a row; None where drafts were not drawn."""
    if q is None:
        return None
    assert target_ids is not None and tree.source is not None
    drawn = q[slot, tree.source[slot, tree.first_child[slot, row]]]
    return drawn.new_zeros(vocab_size).index_copy_(0, target_ids, drawn)
