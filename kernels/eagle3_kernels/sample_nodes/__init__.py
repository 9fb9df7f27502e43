"""Draw the target's token at tree nodes, with noise that depends on request and position alone."""

from eagle3_kernels.sample_nodes.reference import (
    Purpose,
    greedy_nodes,
    gumbel,
    perturbed_scores,
    request_seed,
    sample_node,
    sample_nodes,
)

__all__ = [
    "Purpose",
    "greedy_nodes",
    "gumbel",
    "perturbed_scores",
    "request_seed",
    "sample_node",
    "sample_nodes",
]
