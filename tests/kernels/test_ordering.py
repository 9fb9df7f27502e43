"""stable_topk and packed bits: catches device-dependent tie order and a lost sign bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_kernels.bits import pack_bits, unpack_bits, words
from eagle3_kernels.ordering import stable_topk

quick = settings(max_examples=50, deadline=None, derandomize=True)
INF = float("inf")
FEW_VALUES = [-INF, -3.0, -1.0, -0.5, -0.0, 0.0, 0.5, 2.0, INF]


@quick
@given(
    st.lists(st.sampled_from([-INF, -3.0, -1.0, -0.5, -0.0, 0.0, 0.5, 2.0, INF]), min_size=1, max_size=20), st.data()
)
def test_equal_values_keep_the_lower_index(values, data):
    k = data.draw(st.integers(1, len(values)))
    best, index = stable_topk(torch.tensor(values), k)
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert index.tolist() == expected
    assert best.tolist() == [values[i] for i in expected]


def test_order_of_all_kinds_of_floats():
    tiny = torch.finfo(torch.float32).tiny
    ascending = torch.tensor([-INF, -1e30, -1.0, -tiny, -tiny / 4, 0.0, tiny / 4, tiny, 1.0, 1e30, INF])
    assert stable_topk(ascending, len(ascending))[0].tolist() == ascending.flip(0).tolist()


@pytest.mark.parametrize("nan", [float("nan"), INF - INF, -float("nan")])
def test_a_nan_sorts_first_whatever_its_sign(nan):
    """inf - inf gives a negative NaN, which must not hide behind the k best."""
    x = torch.tensor([[1.0, nan, 3.0], [2.0, 2.0, 2.0]])
    best, index = stable_topk(x, 2)
    assert best[0, 0].isnan()
    assert index.tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize("k", [1, 3, 7])
def test_of_more_nans_than_wanted_the_lowest_are_taken(k):
    x = torch.full((20,), float("nan"))
    x[0], x[1:4] = INF, -float("nan")
    assert stable_topk(x, k)[1].tolist() == list(range(1, k + 1))


@pytest.mark.parametrize("k", [1, 4, 16, 60, 64])
def test_rounded_values_tie_across_the_edge(k):
    """Rows with and without equals beyond the k-th, as bf16 logits give them."""
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(k)).mul(3).round() / 3
    x[0] = torch.randperm(64).float()
    expected = [sorted(range(64), key=lambda i, row=row: (-row[i], i))[:k] for row in x.tolist()]
    assert stable_topk(x, k)[1].tolist() == expected


def test_batches_are_independent():
    x = torch.randn(3, 4, 50)
    best, index = stable_topk(x, 7)
    assert torch.equal(best, x.topk(7).values)
    assert torch.equal(x.gather(-1, index), best)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 100])
def test_bits_survive_packing(n):
    flags = torch.rand(5, n, generator=torch.Generator().manual_seed(n)) < 0.5
    flags[0] = True
    packed = pack_bits(flags)
    assert packed.dtype == torch.int32
    assert packed.shape == (5, words(n))
    assert torch.equal(unpack_bits(packed, n), flags)


def test_bit_31_is_the_sign_bit():
    flags = torch.zeros(32, dtype=torch.bool)
    flags[31] = True
    assert pack_bits(flags).tolist() == [-(2**31)]
