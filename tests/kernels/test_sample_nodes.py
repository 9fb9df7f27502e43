"""The draw: filters against transformers' own, the laws that rejection rules read, ties and bad logits."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle3_kernels.sample_nodes import (
    Filters,
    draft_log_probs,
    greedy_nodes,
    perturbed_scores,
    request_seed,
    sample_node,
    sample_nodes,
    target_probs,
)
from eagle3_kernels.sample_nodes.filters import survivors, tempered

SETTINGS = [
    Filters(1.0),
    Filters(0.6),
    Filters(1.0, top_k=5),
    Filters(1.0, top_p=0.8),
    Filters(1.0, min_p=0.2),
    Filters(0.8, 6, 0.9),
    Filters(1.3, 7, 0.9, 0.1),
]


def processed(logits: Tensor, filters: Filters) -> Tensor:
    """transformers' own warpers in generate's order."""
    warpers: list[Any] = [TemperatureLogitsWarper(filters.temperature)]
    if filters.top_k:
        warpers.append(TopKLogitsWarper(filters.top_k))
    if filters.top_p < 1:
        warpers.append(TopPLogitsWarper(filters.top_p))
    if filters.min_p:
        warpers.append(MinPLogitsWarper(filters.min_p))
    scores = logits.float()[None]
    for warp in warpers:
        scores = warp(None, scores)
    return scores[0]


def kept_by(scores: Tensor, filters: Filters) -> list[int]:
    ids = survivors(scores, filters)
    return list(range(len(scores))) if ids is None else ids.tolist()


def noisy(vocab: int, spread: float = 1.5, seed: int = 0) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("filters", SETTINGS)
def test_draws_follow_the_processed_distribution(filters):
    """4000 draws over 12 tokens: each count within five standard deviations (84 counts: 5e-5 by chance)."""
    logits, draws = noisy(12), 4000
    law = processed(logits, filters).softmax(-1).double()
    drawn = [sample_node(logits, filters, request_seed(0, i), 5) for i in range(draws)]
    counts = torch.tensor(drawn).bincount(minlength=12)
    assert counts[law == 0].sum() == 0
    assert ((counts - draws * law).abs() <= 5 * (draws * law * (1 - law)).sqrt()).all()


@pytest.mark.parametrize("vocab", [3, 300, 5000])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_filters_keep_what_transformers_keeps(vocab, spread):
    settings = itertools.product((0.7, 1.3), (0, 1, 40, 10**6), (0.05, 0.5, 0.9, 0.999, 1.0), (0.0, 0.02, 0.5, 1.0))
    for seed, filters in enumerate(itertools.starmap(Filters, settings)):
        logits = noisy(vocab, spread, seed)
        expected = processed(logits, filters).isfinite().nonzero().flatten().tolist()
        assert kept_by(tempered(logits, filters.temperature), filters) == expected


@pytest.mark.parametrize("filters", [Filters(1.0, top_k=2), Filters(1.0, min_p=0.3), Filters(1.0, top_k=3, min_p=1.0)])
def test_ties_at_the_edge_of_top_k_and_min_p_stay_as_with_transformers(filters):
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0, 3.0])
    assert kept_by(logits, filters) == processed(logits, filters).isfinite().nonzero().flatten().tolist()


@pytest.mark.parametrize("vocab", [40, 3000])
def test_ties_at_the_edge_of_top_p_keep_the_lowest_ids(vocab):
    """Logits in half steps, as bfloat16 makes them: the values are transformers', which leaves the ids open."""
    for seed, top_p in itertools.product(range(5), (0.1, 0.3, 0.6, 0.95)):
        scores = (noisy(vocab, 2.0, seed) * 2).round() / 2
        filters = Filters(1.0, top_p=top_p)
        kept = kept_by(scores, filters)
        expected = processed(scores, filters)
        assert scores[kept].sort().values.tolist() == expected[expected.isfinite()].sort().values.tolist()
        edge = scores[kept].min()
        assert (scores == edge).nonzero().flatten().tolist()[: int((scores[kept] == edge).sum())] == [
            i for i in kept if scores[i] == edge
        ]


@pytest.mark.parametrize("filters", SETTINGS)
def test_target_probabilities_are_the_processed_softmax(filters):
    logits = noisy(300, 3.0)
    expected = processed(logits, filters).double().softmax(-1)
    assert torch.equal(target_probs(logits, filters, torch.float64), expected)
    ours = target_probs(logits, filters)
    assert ours.dtype == torch.float32
    assert (ours == 0).tolist() == (expected == 0).tolist()
    assert torch.allclose(ours.double(), expected, rtol=1e-5, atol=0)


def test_target_probabilities_without_temperature_are_all_on_the_lowest_argmax():
    logits = torch.tensor([1.0, 5.0, 5.0])
    assert target_probs(logits, Filters(0.0, 2, 0.5, 0.5)).tolist() == [0, 1, 0]


@pytest.mark.parametrize("filters", SETTINGS)
def test_probabilities_and_draws_are_of_one_law(filters):
    """What the draw maximises is log p plus noise, up to a constant."""
    logits = noisy(50)
    p = target_probs(logits, filters, torch.float64)
    ids, scores = perturbed_scores(logits, filters, 1, 2)
    plain_ids, noise = perturbed_scores(torch.zeros(50), Filters(1.0), 1, 2)
    assert plain_ids is None
    kept = torch.arange(50) if ids is None else ids
    assert kept.tolist() == p.nonzero().flatten().tolist()
    constant = scores - noise[kept] - p[kept].log()
    assert torch.allclose(constant, constant[0].expand_as(constant), atol=1e-5)


@pytest.mark.parametrize("filters", SETTINGS)
@pytest.mark.parametrize("vocab", [12, 3000])
def test_draft_rows_are_filtered_as_each_row_alone(filters, vocab):
    """Rows of any shape; where nothing ties, the tokens are those of the target's own filters."""
    logits = torch.stack([noisy(vocab, 0.3 + seed, seed) for seed in range(6)]).view(2, 3, vocab)
    log_q = draft_log_probs(logits, filters)
    assert log_q.shape == logits.shape
    for row, q in zip(logits.view(6, vocab), log_q.view(6, vocab).exp(), strict=True):
        assert torch.allclose(q, target_probs(row, filters), rtol=1e-4, atol=1e-9)
        assert torch.allclose(q, draft_log_probs(row, filters).exp(), rtol=1e-5, atol=1e-9)


def test_a_greedy_draft_is_the_plain_log_softmax():
    logits = noisy(20).bfloat16()
    assert torch.equal(draft_log_probs(logits, Filters(0.0, 3, 0.5, 0.5)), logits.float().log_softmax(-1))
    # what a draft ties at the edge is all kept
    assert draft_log_probs(torch.tensor([1.0, 2.0, 2.0]), Filters(1.0, top_p=0.1)).isfinite().tolist() == [
        False,
        True,
        True,
    ]


def test_greedy_takes_the_lowest_id_at_ties():
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, 2.0, 2.0]])
    assert greedy_nodes(logits).tolist() == [1, 0]
    assert greedy_nodes(logits.bfloat16()).tolist() == [1, 0]


def test_rows_with_their_own_parameters():
    logits = torch.stack([noisy(50, seed=seed) for seed in range(4)])
    filters = [Filters(), Filters(1.0, 0, 0.9), Filters(0.7, 5), Filters(0.9, min_p=0.1)]
    drawn = sample_nodes(logits, filters, [1, 2, 3, 4], [10, 11, 12, 13])
    assert drawn.tolist() == [sample_node(logits[r], filters[r], r + 1, 10 + r) for r in range(4)]
    assert sample_nodes(logits[:0], [], [], []).tolist() == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_raise_naming_the_dtype(bad):
    logits = torch.zeros(2, 4, dtype=torch.float16)
    logits[1, 2] = bad
    with pytest.raises(FloatingPointError, match="float16"):
        greedy_nodes(logits)
    for of_one in (lambda f: sample_node(logits[1], f, 0, 0), lambda f: target_probs(logits[1], f)):
        with pytest.raises(FloatingPointError, match="float16"):
            of_one(Filters(1.0))
    # a forbidden token is no error
    forbidden = torch.tensor([0.0, -torch.inf])
    assert sample_node(forbidden, Filters(1.0), 0, 0) == 0
    assert target_probs(forbidden, Filters(1.0, top_p=0.9)).tolist() == [1, 0]
