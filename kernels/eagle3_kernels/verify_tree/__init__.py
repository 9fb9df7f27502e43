"""Walk the tree along what the target, or a rejection rule, accepts."""

from torch import Tensor

from eagle3_kernels.dispatch import uses_triton
from eagle3_kernels.structures import Tree, Walk
from eagle3_kernels.verify_tree import reference
from eagle3_kernels.verify_tree.reference import Decide, match
from eagle3_kernels.verify_tree.rules import REJECTION, TARGET_ONLY, THRESHOLD

__all__ = ["REJECTION", "TARGET_ONLY", "THRESHOLD", "Decide", "match", "verify_sampled", "verify_tree"]


def verify_tree(tree: Tree, target: Tensor | Decide) -> Walk:
    # a rule given as a function decides on the host
    if isinstance(target, Tensor) and uses_triton(tree.tokens):
        from eagle3_kernels.verify_tree import kernel

        return kernel.verify_tree(tree, target)
    return reference.verify_tree(tree, target)


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
    if rule not in (TARGET_ONLY, REJECTION, THRESHOLD):
        raise ValueError(f"rule {rule!r}; it must be one of {TARGET_ONLY}, {REJECTION}, {THRESHOLD}")
    if rule == REJECTION and (q is None or target_ids is None or tree.source is None):
        raise ValueError(f"{REJECTION} needs q, target_ids and tree.source: the laws that drew the drafts")
    if rule != REJECTION and q is not None:
        raise ValueError(f"{rule} looks at no q: its drafts are no draws")
    if uses_triton(p):
        from eagle3_kernels.verify_tree import kernel

        return kernel.verify_sampled(tree, p, seeds, positions, rule, q, target_ids, threshold, greedy)
    return reference.verify_sampled(tree, p, seeds, positions, rule, q, target_ids, threshold, greedy)


verify_tree.__doc__, verify_sampled.__doc__ = reference.verify_tree.__doc__, reference.verify_sampled.__doc__
