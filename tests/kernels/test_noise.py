"""The keyed noise: its very integers, and the statistics of its law and independence; a weaker hash fails them.

Seeds are fixed, so a test either always passes or never does. P_VALUE is what an ideal hash would miss by chance: a
statistic fails below P_VALUE or above 1 - P_VALUE (too regular). Some 210 statistics, two-sided: together below 1e-4.
"""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from eagle3_kernels.sample_nodes import Purpose, gumbel, mixed_gumbel, mixed_ids, request_seed, uniforms
from eagle3_kernels.sample_nodes import noise as keyed
from eagle3_kernels.sample_nodes.noise import hash_words, noise_integers, to_gumbel, to_uniform, vocabulary_gumbel

P_VALUE = 1e-7
COUNT = 1 << 14
IDS = torch.arange(COUNT)


def chi_square(counts: Tensor, expected: Tensor | float) -> float:
    """Tail probability of Pearson's statistic."""
    statistic = ((counts - expected) ** 2 / expected).sum().double()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


def kolmogorov(uniform: Tensor) -> float:
    """Tail probability of the largest distance from the uniform law on [0, 1] (its limit, good from some 100 draws)."""
    ordered, n = uniform.double().sort().values, len(uniform)
    steps = torch.arange(n + 1).double() / n
    distance = max(float((steps[1:] - ordered).max()), float((ordered - steps[:-1]).max()))
    x = math.sqrt(n) * distance + 0.12 * distance
    terms = [(-1) ** (k - 1) * 2 * math.exp(-2 * (k * x) ** 2) for k in range(1, 50)]
    return min(1.0, max(0.0, sum(terms)))


def one_by_one(keys: list[tuple[int, int, int, int]]) -> Tensor:
    """The integer of each (seed, purpose, position, id)."""
    words = torch.tensor([hash_words(*key[:3]) for key in keys])
    mixed = keyed.mix_words(words.int() ^ mixed_ids(torch.tensor([key[3] for key in keys])))
    return mixed.long() & 0xFFFFFFFF


def sequences() -> Iterator[tuple[str, Tensor]]:
    """Noise along each part of the key, the others held: what a run, a prompt set or a vocabulary sees."""
    for seed, position in ((0, 0), (1, 1), (2**31, 1000)):
        yield f"ids at seed {seed}", noise_integers(seed, Purpose.TARGET, position, IDS)
    for token in (0, 17, 49151):
        yield f"positions of id {token}", one_by_one([(3, Purpose.TARGET, at, token) for at in range(COUNT)])
    yield "seeds", one_by_one([(seed, Purpose.TARGET, 5, 17) for seed in range(COUNT)])
    yield "prompts", one_by_one([(request_seed(0, i), Purpose.TARGET, 5, 17) for i in range(COUNT)])
    yield "samples", one_by_one([(request_seed(0, 0, 0, i), Purpose.TARGET, 5, 17) for i in range(COUNT)])
    yield "purposes", one_by_one([(3, Purpose(1 + i % 4), i // 4, 17) for i in range(COUNT)])
    yield "coins", one_by_one([(3, Purpose.ACCEPT, i // 4, i % 4) for i in range(COUNT)])


def neighbours() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Pairs of sequences whose keys are as near as keys can be."""
    here = noise_integers(5, Purpose.TARGET, 9, IDS)
    yield "ids", here, noise_integers(5, Purpose.TARGET, 9, IDS + 1)
    yield "positions", here, noise_integers(5, Purpose.TARGET, 10, IDS)
    yield "swapped", here, noise_integers(9, Purpose.TARGET, 5, IDS)
    for purpose in (Purpose.ACCEPT, Purpose.RESIDUAL, Purpose.DRAFT):
        yield purpose.name, here, noise_integers(5, purpose, 9, IDS)
    for bit in range(32):
        yield f"seed bit {bit}", here, noise_integers(5 ^ 1 << bit, Purpose.TARGET, 9, IDS)
    for name, sequence in sequences():
        yield f"successive {name}", sequence[:-1], sequence[1:]


def uniformity() -> dict[str, float]:
    """Each byte by chi-square, the whole by Kolmogorov and Smirnov."""
    found = {}
    for name, integers in sequences():
        for shift in (0, 8, 16, 24):
            found[f"{name}, byte {shift // 8}"] = chi_square(
                (integers >> shift & 255).bincount(minlength=256), COUNT / 256
            )
        found[f"{name}, whole"] = kolmogorov((integers.double() + 0.5) / 2**32)
    return found


def independence() -> dict[str, float]:
    """Pairs of high, of low nibbles, and of their differences, in 256 cells each."""
    found = {}
    for name, a, b in neighbours():
        for shift in (28, 0):
            cells = (a >> shift & 15) * 16 + (b >> shift & 15)
            found[f"{name}, nibble {shift // 4}"] = chi_square(cells.bincount(minlength=256), len(a) / 256)
        found[f"{name}, flipped bits"] = chi_square((a ^ b).bitwise_and(255).bincount(minlength=256), len(a) / 256)
    return found


def outside(found: dict[str, float]) -> dict[str, float]:
    return {name: p for name, p in found.items() if not P_VALUE < p < 1 - P_VALUE}


def test_integers_are_pinned():
    """A kernel must make these very integers; so must later versions, or seeds lose their meaning."""
    assert [keyed.mix(x) for x in (0, 1, 2, 0xFFFFFFFF)] == [0, 1753845952, 3507691905, 1734902346]
    assert hash_words(1, 2, 3) == 3752019095
    assert request_seed(0, 0) == 1297094717
    assert noise_integers(7, Purpose.TARGET, 100, torch.tensor([0, 1, 49151])).tolist() == [
        337811896,
        861758183,
        1459957036,
    ]


def test_words_and_numbers_are_mixed_alike():
    """Every bit pattern of the highest byte, and numbers one by one; mixing changes no bits twice the same way."""
    numbers = [*range(1000), *(b << 24 | 77 for b in range(256)), 2**31 - 1, 2**31, 2**32 - 1]
    words = torch.tensor(numbers).int()
    assert (keyed.mix_words(words.clone()).long() & 0xFFFFFFFF).tolist() == [keyed.mix(x) for x in numbers]
    many = torch.arange(-(1 << 19), 1 << 19, dtype=torch.int32)
    assert len(keyed.mix_words(many).unique()) == 1 << 20


def test_every_form_of_the_noise_is_one():
    """A vocabulary, its premixed ids and each id alone; the ids given are not changed."""
    ids = torch.tensor([3, 0, 40_000], dtype=torch.int32)
    whole = vocabulary_gumbel(5, Purpose.DRAFT, 12, 50_000, ids.device)
    assert torch.equal(gumbel(5, Purpose.DRAFT, 12, ids), whole[ids])
    assert torch.equal(mixed_gumbel(5, Purpose.DRAFT, 12, mixed_ids(ids)), whole[ids])
    assert ids.tolist() == [3, 0, 40_000]
    assert torch.equal(one_by_one([(5, 4, 12, 3), (5, 4, 12, 0)]), noise_integers(5, Purpose.DRAFT, 12, ids[:2]))


def test_noise_is_uniform_along_every_part_of_its_key():
    assert outside(uniformity()) == {}


def test_noise_of_neighbouring_keys_is_independent():
    assert outside(independence()) == {}


def test_weaker_hashes_fail(monkeypatch):
    """The statistics see what they are for: one round of the hash, and both without its last shift."""
    rounds = keyed._ROUNDS
    monkeypatch.setattr(keyed, "_ROUNDS", rounds[:1])
    assert outside(uniformity())
    found = independence()
    assert len(outside(found)) > len(found) / 2
    monkeypatch.setattr(keyed, "_ROUNDS", rounds[:2])
    found = independence()
    assert len(outside(found)) > len(found) / 5


def test_request_seeds_differ_in_every_part():
    seeds = {request_seed(*key) for key in itertools.product((0, 1, -1, 2**40), range(5), range(3), range(3))}
    assert len(seeds) == 4 * 5 * 3 * 3


def test_coins_lie_below_one_and_follow_the_siblings():
    coins = uniforms(1, Purpose.ACCEPT, 3, 6, "cpu")
    assert torch.equal(coins[:2], uniforms(1, Purpose.ACCEPT, 3, 2, "cpu"))
    assert len(coins.unique()) == 6
    assert 0 <= float(to_uniform(torch.tensor([0]))) < float(to_uniform(torch.tensor([2**32 - 1]))) < 1
    many = uniforms(1, Purpose.ACCEPT, 4, COUNT, "cpu")
    assert P_VALUE < kolmogorov(many) < 1 - P_VALUE


def test_gumbel_is_finite_monotone_and_precise_where_argmax_looks():
    edges = to_gumbel(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]))
    assert edges.isfinite().all()
    assert (edges.diff() <= 0).all()
    # -log(2^-33)
    assert float(edges[0]) == pytest.approx(22.8739, abs=1e-3)


@pytest.mark.parametrize("vocab", [1, 40, 1500])
def test_the_largest_of_many_gumbels_has_their_law_shifted(vocab):
    """max of V is log V + Gumbel."""
    ids = mixed_ids(torch.arange(vocab))
    best = torch.stack([mixed_gumbel(11, Purpose.TARGET, at, ids).max() for at in range(3000)]).double()
    assert P_VALUE < kolmogorov((-(math.log(vocab) - best).exp()).exp()) < 1 - P_VALUE


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 4.0])
def test_the_argmax_over_positions_follows_the_law(sharpness):
    """Flat, usual and peaked p over 50 tokens; rare ones share a cell."""
    log_p = (torch.randn(50, generator=torch.Generator().manual_seed(1)) * sharpness).log_softmax(0)
    ids = mixed_ids(torch.arange(50))
    tokens = [int((log_p + mixed_gumbel(2, Purpose.TARGET, at, ids)).argmax()) for at in range(COUNT)]
    counts, expected = torch.tensor(tokens).bincount(minlength=50).double(), COUNT * log_p.double().exp()
    rare = expected < 10
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    assert P_VALUE < chi_square(counts, expected) < 1 - P_VALUE
