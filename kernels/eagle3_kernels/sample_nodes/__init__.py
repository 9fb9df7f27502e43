"""Draw the target's token at tree nodes, with noise that depends on request and position alone."""

from collections.abc import Sequence

from torch import Tensor

from eagle3_kernels.dispatch import uses_triton
from eagle3_kernels.sample_nodes import reference
from eagle3_kernels.sample_nodes.filters import Filters, check_tokens, draft_log_probs, target_probs
from eagle3_kernels.sample_nodes.noise import (
    Purpose,
    gumbel,
    mixed_gumbel,
    mixed_ids,
    request_seed,
    uniforms,
    vocabulary_gumbel,
)
from eagle3_kernels.sample_nodes.reference import perturbed_scores

__all__ = [
    "Filters",
    "Purpose",
    "check_tokens",
    "draft_log_probs",
    "greedy_nodes",
    "gumbel",
    "mixed_gumbel",
    "mixed_ids",
    "perturbed_scores",
    "request_seed",
    "sample_node",
    "sample_nodes",
    "sample_rows",
    "target_probs",
    "uniforms",
    "vocabulary_gumbel",
]


def greedy_nodes(logits: Tensor, checked: bool = True) -> Tensor:
    """The largest logit's token per row of [R, V], lowest id at ties, int64 [R].

    Args:
        checked: raise at once, which waits for the device. False: the token of a row whose largest logit is not
            finite is -1, and `check_tokens` raises once the caller has copied the tokens that it uses.
    Raises:
        FloatingPointError: checked, and a row's largest logit is not finite.
    """
    if uses_triton(logits):
        from eagle3_kernels.sample_nodes import kernel

        tokens = kernel.greedy_nodes(logits)
    else:
        tokens = reference.greedy_nodes(logits)
    return _checked(tokens, logits) if checked else tokens


def sample_rows(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, min_p: Tensor | None = None
) -> Tensor:
    if uses_triton(logits):
        from eagle3_kernels.sample_nodes import kernel

        return kernel.sample_rows(logits, temperature, seeds, positions, min_p)
    return reference.sample_rows(logits, temperature, seeds, positions, min_p)


def sample_nodes(logits: Tensor, filters: Sequence[Filters], seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    if uses_triton(logits):
        from eagle3_kernels.sample_nodes import kernel

        return _checked(kernel.sample_nodes(logits, filters, seeds, positions), logits)
    return reference.sample_nodes(logits, filters, seeds, positions)


def sample_node(logits: Tensor, filters: Filters, seed: int, position: int) -> int:
    """One row of sample_nodes, logits [V]."""
    if uses_triton(logits):
        return int(sample_nodes(logits[None], [filters], [seed], [position]))
    return reference.sample_node(logits, filters, seed, position)


def _checked(tokens: Tensor, logits: Tensor) -> Tensor:
    check_tokens(tokens.tolist(), logits.dtype)
    return tokens


sample_rows.__doc__, sample_nodes.__doc__ = reference.sample_rows.__doc__, reference.sample_nodes.__doc__
