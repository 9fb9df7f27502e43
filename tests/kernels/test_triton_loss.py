"""draft_loss with Triton's rows against the definition in float64: values, predictions and gradients of every term.

Catches: an edge of a vocabulary that is no multiple of a block, a row with another's teacher, sums that drift over a
large vocabulary, p taken for P, a tie broken upwards, a NaN that a comparison hides, a result that nobody writes (they
are NaN here), logits copied on the way.
"""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from eagle3_kernels.draft_loss import draft_loss, rows
from eagle3_kernels.draft_loss.reference import draft_loss_reference
from eagle3_kernels.loss_terms import LOSS_TERMS, SOFT_CE
from eagle3_kernels.testing import device, poisoned

kernel = pytest.importorskip("eagle3_kernels.draft_loss.kernel", reason="needs triton", exc_type=ImportError)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EVERY = {name: 0.1 + i for i, name in enumerate(LOSS_TERMS)}
MIXES = [*({name: 1.0} for name in LOSS_TERMS), {"soft_ce": 0.0, "tv": 0.7}, {"kl": 0.3, "hard_ce": 1.0}, EVERY]
# less than a block, an edge of one, several with a rest
VOCABS = (1, 7, kernel.BLOCK - 1, kernel.BLOCK, 2 * kernel.BLOCK + 77)


@pytest.fixture(autouse=True)
def triton_kernels(monkeypatch):
    monkeypatch.setenv("EAGLE3_KERNELS", "triton")


def make(count: int, vocab: int, dtype: torch.dtype = FP32, mass: float = 0.6, seed: int = 0) -> list[Tensor]:
    """h, weight, teacher, teacher_lse (`mass` of the teacher lies in the draft vocabulary), taught, row_weights."""
    draw, entries = torch.Generator().manual_seed(seed), max(1, count // 2)
    h, teacher = torch.randn(count, 8, generator=draw), 3 * torch.randn(entries, vocab, generator=draw)
    weight = torch.randn(vocab, 8, generator=draw)
    lse = teacher.to(dtype).float().logsumexp(-1) - math.log(mass)
    taught = torch.randint(0, entries, (count,), generator=draw)
    row_weights = torch.rand(count, generator=draw) * (torch.rand(count, generator=draw) < 0.8)
    tensors = h.to(dtype), weight, teacher.to(dtype), lse, taught, row_weights
    return [x.to(device()) for x in tensors]


def run(op, h: Tensor, weight: Tensor, *rest) -> tuple:
    """(result, gradient of h, gradient of weight)."""
    h, weight = h.clone().requires_grad_(), weight.clone().requires_grad_()
    result = op(h, weight, *rest)
    return result, *torch.autograd.grad(3 * result.loss, (h, weight))


def in_double(tensors: list[Tensor]) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in tensors]


def check(tensors: list[Tensor], terms: Mapping[str, float], tolerance: float = 1e-4) -> None:
    with poisoned():
        found, *found_grads = run(draft_loss, *tensors, terms)
    wanted, *wanted_grads = run(draft_loss_reference, *in_double(tensors), terms)
    for name in ("loss", "row_loss", "alpha"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m)
    assert torch.equal(found.prediction, wanted.prediction)
    for name, f, w in zip(("h", "weight"), found_grads, wanted_grads, strict=True):
        assert (f - w).norm() <= tolerance * w.norm() + 1e-6, name


@pytest.mark.parametrize("i", range(len(MIXES)))
def test_mixes_and_vocabularies(i):
    """Every mix and every vocabulary, in pairs."""
    check(make(6, VOCABS[i % 5]), MIXES[i])
    check(make(6, VOCABS[(3 * i + 1) % 5], mass=(1.0, 1e-3)[i % 2], seed=i), MIXES[i])


@pytest.mark.full
@pytest.mark.parametrize("terms", MIXES, ids="+".join)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("mass", [1.0, 0.6, 1e-3])
def test_the_grid(terms, vocab, mass):
    check(make(11, vocab, mass=mass, seed=3), terms)


@pytest.mark.parametrize("terms", [SOFT_CE, EVERY], ids=["soft_ce", "every"])
@pytest.mark.parametrize("vocab", [131073, pytest.param(262144, marks=pytest.mark.full)])
def test_a_whole_vocabulary(vocab, terms):
    """Sums over a target's vocabulary: rounding that grows with it."""
    check(make(2, vocab), terms, tolerance=2e-4)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("terms", [SOFT_CE, EVERY], ids=["soft_ce", "every"])
def test_half_precision(dtype, terms):
    """At most twice the error of plain PyTorch in the same dtype, per tensor."""
    tensors = make(60, 1003, dtype)
    with poisoned():
        found, *found_grads = run(draft_loss, *tensors, terms)
    # weights are rounded to the dtype of h in both
    exact, *exact_grads = run(draft_loss_reference, *in_double([tensors[0], tensors[1].to(dtype), *tensors[2:]]), terms)
    plain, *plain_grads = run(draft_loss_reference, *tensors, terms)
    assert found_grads[0].dtype == dtype
    assert found_grads[1].dtype == FP32
    pairs = [(getattr(x, name) for x in (found, exact, plain)) for name in ("row_loss", "alpha")]
    for ours, wanted, other in (*pairs, *zip(found_grads, exact_grads, plain_grads, strict=True)):
        assert (ours.double() - wanted).norm() <= 2 * (other.double() - wanted).norm() + 1e-6 * wanted.norm()


def test_chunks_change_nothing(monkeypatch):
    """A chunk's edge that loses or repeats rows, or shifts their teacher."""
    tensors = make(11, 70)
    outs = []
    for chunk in (1, 4 * 70, 10**6):
        monkeypatch.setattr(kernel, "GPU_CHUNK", chunk)
        result, *grads = run(draft_loss, *tensors, EVERY)
        outs.append((*result, *grads))
    for first, *others in zip(*outs, strict=True):
        for other in others:
            torch.testing.assert_close(first, other, rtol=1e-5, atol=1e-6)


def test_ties_go_to_the_lowest_id():
    """Equal logits in one block, in two blocks, and in all."""
    vocab = kernel.BLOCK + 100
    z = torch.zeros(3, vocab, device=device())
    z[0, [5, 9, kernel.BLOCK + 3]] = 1.0
    z[1, [kernel.BLOCK + 3, kernel.BLOCK + 7]] = 1.0
    teacher = torch.zeros(1, vocab, device=device())
    teacher[0, [4, kernel.BLOCK + 50]] = 2.0
    row = torch.zeros(3, dtype=torch.int64, device=device())
    given = z, teacher, teacher.logsumexp(-1), row, torch.ones(3, device=device())
    found = kernel.loss_rows(*given, {"hard_ce": 1.0}, True)
    assert found.prediction.tolist() == [5, kernel.BLOCK + 3, 0]
    # the gradient of a cross-entropy is negative at its label alone
    assert (z < 0).nonzero().tolist() == [[0, 4], [1, 4], [2, 4]]


@pytest.mark.parametrize("name", LOSS_TERMS)
def test_extremes_stay_finite_and_a_nan_shows(name):
    """exp or 1 / alpha overflowing where draft and teacher are certain; NaN swallowed by a maximum or a comparison."""
    weight = torch.eye(4)
    h = 200 * torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 0, 0], [0, 0, 1.0, 0]])
    teacher = 200 * torch.tensor([[1.0, 0, 0, 0], [0, math.nan, 1.0, 0]])
    lse, taught = torch.tensor([200.0, 200.0]), torch.tensor([0, 0, 0, 1])
    arguments = (x.to(device()) for x in (h, weight, teacher, lse, taught, torch.ones(4)))
    result, d_h, _ = run(draft_loss, *arguments, {name: 1.0})
    for x in (result.row_loss, result.alpha, d_h):
        assert x[:3].isfinite().all()
        assert x[3].isnan().any()
    assert result.alpha[:3].tolist() == pytest.approx([1, 0, 0.25])
    assert result.row_loss[0].item() == pytest.approx(0, abs=1e-6)
    assert d_h[0].abs().max() < 1e-5
    assert result.row_loss[1] > result.row_loss[2] > 0


def test_nan_logits_show():
    """A diverged head: NaN loss, and a prediction that is still a token."""
    h, *rest = make(4, 20)
    h[1] = math.nan
    result, *_ = run(draft_loss, h, *rest, {"tv": 1.0})
    assert result.loss.isnan()
    assert result.row_loss.isnan().tolist() == [False, True, False, False]
    assert ((result.prediction >= 0) & (result.prediction < 20)).all()


def test_rows_of_weight_zero_and_no_rows():
    """A row that does not count moves nothing, but is measured; a batch that supervises nothing is fine."""
    tensors = make(12, 30)
    zero = tensors[-1] == 0
    assert 0 < zero.sum() < 12, "the test needs both kinds"
    result, d_h, _ = run(draft_loss, *tensors, EVERY)
    assert not d_h[zero].any()
    assert (result.row_loss > 0).all()
    result, _, d_weight = run(draft_loss, *make(0, 30), EVERY)
    assert (result.loss.item(), result.prediction.shape) == (0.0, (0,))
    assert not d_weight.any()


def test_evaluation_leaves_the_logits():
    """Without gradients nothing is overwritten; values are the same."""
    h, weight, teacher, lse, taught, row_weights = make(5, 300, BF16)
    z = (h.float() @ weight.T).to(BF16)
    outs = []
    for wants_grad in (False, True):
        given = z.clone()
        outs.append(kernel.loss_rows(given, teacher, lse, taught, row_weights, EVERY, wants_grad))
        assert torch.equal(given, z) != wants_grad
    for first, second in zip(*outs, strict=True):
        assert torch.equal(first, second)


def test_rows_equal_the_torch_rows_in_any_layout():
    """Logits and teachers that are columns of wider tensors."""
    h, weight, teacher, lse, taught, row_weights = make(5, 300)
    z = h @ weight.T
    wide, wide_teacher = torch.full((5, 333), math.nan).to(z), torch.full((len(teacher), 350), math.nan).to(z)
    wide[:, :300], wide_teacher[:, :300] = z, teacher
    found = kernel.loss_rows(wide[:, :300], wide_teacher[:, :300], lse, taught, row_weights, EVERY, True)
    wanted = rows.loss_rows(z, teacher, lse, taught, row_weights, EVERY, True)
    for ours, theirs in zip((*found, wide[:, :300]), (*wanted, z), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert wide[:, 300:].isnan().all()
