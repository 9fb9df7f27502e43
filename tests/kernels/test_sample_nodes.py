"""The keyed noise, its law and its independence, and the filters against transformers' own."""

import itertools
from typing import Any

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle3_kernels.sample_nodes import Purpose, greedy_nodes, gumbel, request_seed, sample_node, sample_nodes
from eagle3_kernels.sample_nodes.reference import hash_words, mix, noise_integers, survivors, to_gumbel

IDS = torch.arange(1 << 16)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Standardised: about N(0, 1) under the law."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(counts) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def test_integers_are_pinned():
    """A kernel must make these very integers; so must later versions, or seeds lose their meaning."""
    assert [mix(x) for x in (0, 1, 2, 0xFFFFFFFF)] == [0, 1753845952, 3507691905, 1734902346]
    assert hash_words(1, 2, 3) == 3752019095
    assert request_seed(0, 0) == 1297094717
    assert noise_integers(7, Purpose.TARGET, 100, torch.tensor([0, 1, 49151])).tolist() == [
        337811896,
        861758183,
        1459957036,
    ]


def test_mix_is_a_bijection_on_a_sample_and_stays_in_32_bits():
    x = torch.arange(1 << 20)
    mixed = mix(x)
    assert len(mixed.unique()) == len(x)
    assert 0 <= int(mixed.min()) <= int(mixed.max()) < 1 << 32
    assert mix(12345) == int(mix(torch.tensor(12345)))


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_of_the_noise_is_uniform(shift):
    for seed, position in itertools.product((0, 1, 2**31), (0, 1, 1000)):
        byte = (noise_integers(seed, Purpose.TARGET, position, IDS) >> shift) & 255
        assert abs(chi_square(byte.bincount(minlength=256), torch.full((256,), len(IDS) / 256))) < 5


def keys_that_differ_in_one_word() -> list[tuple[int, Purpose, int]]:
    near = [(5, Purpose.TARGET, 9), (6, Purpose.TARGET, 9), (5, Purpose.TARGET, 10), (5, Purpose.DRAFT, 9)]
    return [
        *near,
        (5, Purpose.ACCEPT, 9),
        (5, Purpose.RESIDUAL, 9),
        (9, Purpose.TARGET, 5),
        (5 | 1 << 31, Purpose.TARGET, 9),
    ]


def test_noise_of_different_keys_is_uncorrelated():
    draws = torch.stack([noise_integers(*key, IDS).double() for key in keys_that_differ_in_one_word()])
    off_diagonal = torch.corrcoef(draws) - torch.eye(len(draws))
    # 28 pairs of 65536 draws: five sigma
    assert off_diagonal.abs().max() < 5 / len(IDS) ** 0.5
    high_bits = [((a.long() ^ b.long()) >> 28).bincount(minlength=16) for a, b in itertools.combinations(draws, 2)]
    assert max(abs(chi_square(c, torch.full((16,), len(IDS) / 16))) for c in high_bits) < 6


def test_noise_along_positions_and_seeds_is_uniform():
    """One token over many keys: what a law over runs sees."""
    over_positions = torch.tensor([hash_words(3, Purpose.TARGET, p) for p in range(20000)])
    over_prompts = torch.tensor([request_seed(0, prompt, turn) for prompt in range(10000) for turn in (0, 1)])
    for words in (over_positions, over_prompts):
        assert len(words.unique()) > 19990
        noise = mix(words ^ mix(17))
        assert abs(chi_square((noise >> 24).bincount(minlength=256), torch.full((256,), 20000 / 256))) < 5
        neighbours = torch.corrcoef(torch.stack([noise[:-1].double(), noise[1:].double()]))[0, 1]
        assert abs(neighbours) < 5 / 20000**0.5


def test_request_seeds_differ_in_every_part():
    seeds = {request_seed(*key) for key in itertools.product((0, 1, -1, 2**40), range(5), range(3), range(3))}
    assert len(seeds) == 4 * 5 * 3 * 3


def test_gumbel_moments_and_extremes():
    noise = gumbel(1, Purpose.TARGET, 0, torch.arange(1 << 20)).double()
    assert abs(noise.mean() - 0.5772157) < 0.005
    assert abs(noise.var() - torch.pi**2 / 6) < 0.01
    edges = to_gumbel(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]))
    assert edges.isfinite().all()
    assert (edges.diff() <= 0).all()
    # large noise, which argmax looks at, keeps its precision: -log(2^-33)
    assert abs(edges[0] - 22.8739) < 1e-3


@pytest.mark.parametrize(
    "temperature, top_k, top_p", [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.8), (0.8, 6, 0.9)]
)
def test_draws_follow_the_processed_distribution(temperature, top_k, top_p):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 1.5
    law = processed(logits, temperature, top_k, top_p).softmax(-1)
    draws = [sample_node(logits, temperature, top_k, top_p, request_seed(0, i), 5) for i in range(4000)]
    counts = torch.tensor(draws).bincount(minlength=12).double()
    assert counts[law == 0].sum() == 0
    kept = law > 0
    assert abs(chi_square(counts[kept], 4000 * law[kept].double())) < 4.5


def processed(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """transformers' own warpers in generate's order."""
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    scores = logits.float()[None]
    for warp in warpers:
        scores = warp(None, scores)
    return scores[0]


@pytest.mark.parametrize("vocab", [3, 300, 5000])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_filters_keep_what_transformers_keeps(vocab, spread):
    draw = torch.Generator().manual_seed(vocab)
    for temperature, top_k, top_p in itertools.product((0.7, 1.3), (0, 1, 40, 10**6), (0.05, 0.5, 0.9, 0.999, 1.0)):
        logits = torch.randn(vocab, generator=draw) * spread
        expected = processed(logits, temperature, top_k, top_p).isfinite().nonzero().flatten().tolist()
        ids = survivors(logits / temperature, top_k, top_p)
        assert (list(range(vocab)) if ids is None else ids.tolist()) == expected


def test_ties_at_the_top_k_boundary_are_kept_as_transformers_does():
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    kept = survivors(logits, 2, 1.0)
    assert kept is not None
    assert kept.tolist() == processed(logits, 1.0, 2, 1.0).isfinite().nonzero().flatten().tolist()


def test_greedy_takes_the_lowest_id_at_ties():
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, 2.0, 2.0]])
    assert greedy_nodes(logits).tolist() == [1, 0]
    assert greedy_nodes(logits.bfloat16()).tolist() == [1, 0]


def test_rows_with_their_own_parameters():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    temperature, top_k, top_p = torch.tensor([0.0, 1.0, 0.7]), torch.tensor([0, 0, 5]), torch.tensor([1.0, 0.9, 1.0])
    drawn = sample_nodes(logits, temperature, top_k, top_p, torch.tensor([1, 2, 3]), torch.tensor([10, 11, 12]))
    one_by_one = [
        sample_node(logits[r], *(float(temperature[r]), int(top_k[r]), float(top_p[r])), r + 1, 10 + r)
        for r in range(3)
    ]
    assert drawn.tolist() == one_by_one


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_raise_naming_the_dtype(bad):
    logits = torch.zeros(2, 4, dtype=torch.float16)
    logits[1, 2] = bad
    with pytest.raises(FloatingPointError, match="float16"):
        greedy_nodes(logits)
    with pytest.raises(FloatingPointError, match="float16"):
        sample_node(logits[1], 1.0, 0, 1.0, 0, 0)
    assert sample_node(torch.tensor([0.0, -torch.inf]), 1.0, 0, 1.0, 0, 0) == 0
