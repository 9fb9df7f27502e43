"""Draw the target's token at tree nodes, with noise that depends on request and position alone."""

from eagle3_kernels.sample_nodes.filters import Filters, draft_log_probs, target_probs
from eagle3_kernels.sample_nodes.noise import (
    Purpose,
    gumbel,
    mixed_gumbel,
    mixed_ids,
    request_seed,
    uniforms,
    vocabulary_gumbel,
)
from eagle3_kernels.sample_nodes.reference import greedy_nodes, perturbed_scores, sample_node, sample_nodes

__all__ = [
    "Filters",
    "Purpose",
    "draft_log_probs",
    "greedy_nodes",
    "gumbel",
    "mixed_gumbel",
    "mixed_ids",
    "perturbed_scores",
    "request_seed",
    "sample_node",
    "sample_nodes",
    "target_probs",
    "uniforms",
    "vocabulary_gumbel",
]
