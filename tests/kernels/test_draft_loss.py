"""Fused draft loss against its definition, in value, prediction, alpha and gradients."""

import math

import pytest
import torch

from eagle3_kernels.draft_loss import draft_loss, fused
from eagle3_kernels.draft_loss.reference import draft_loss_reference


def inputs(rows, vocab, hidden=16, dtype=torch.float32, scale=1.0, seed=0):
    """h, weight; a teacher of fewer entries than rows, with its log-sum-exp over a larger vocabulary; which entry
    teaches each row; the rows' weights, some of them 0."""
    draw = torch.Generator().manual_seed(seed)
    entries = max(1, rows // 2)
    h = torch.randn(rows, hidden, generator=draw)
    weight = torch.randn(vocab, hidden, generator=draw) * 0.5
    teacher = 3 * torch.randn(entries, vocab, generator=draw)
    outside = 3 * torch.randn(entries, 5, generator=draw)
    lse = torch.cat((teacher, outside), -1).logsumexp(-1)
    taught = torch.randint(0, entries, (rows,), generator=draw)
    row_weights = scale * torch.rand(rows, generator=draw) * (torch.rand(rows, generator=draw) < 0.8)
    return h.to(dtype), weight, teacher.to(dtype), lse, taught, row_weights


def run(op, h, weight, *rest):
    """(result, gradient of h, gradient of weight)."""
    h, weight = h.clone().requires_grad_(), weight.clone().requires_grad_()
    result = op(h, weight, *rest)
    grads = torch.autograd.grad(3 * result.loss, (h, weight))
    return result, *grads


@pytest.mark.parametrize("vocab", [1, 7, 1000])
@pytest.mark.parametrize("rows, chunk", [(1, 512), (9, 4), (8, 4), (30, 512), (5, 1)])
def test_equals_the_definition(rows, vocab, chunk, monkeypatch):
    """A chunk's edge that loses or repeats rows, a row with another's teacher or weight, alpha renormalised."""
    monkeypatch.setattr(fused, "CHUNK", chunk * vocab)
    found, d_h, d_weight = run(draft_loss, *inputs(rows, vocab))
    wanted, e_h, e_weight = run(draft_loss_reference, *inputs(rows, vocab))
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.row_loss, wanted.row_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.prediction, wanted.prediction)
    torch.testing.assert_close(found.alpha, wanted.alpha, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(d_h, e_h, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(d_weight, e_weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", [draft_loss, draft_loss_reference])
def test_by_hand(op):
    """The formula itself: q = (1/4, 3/4), p = (1/2, 1/2) of which the target gives 0.8 to the draft vocabulary."""
    h, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    teacher = torch.tensor([[9.0, 9.0], [math.log(0.4)] * 2])
    result, d_h, d_weight = run(
        op, h, weight, teacher, torch.tensor([20.0, 0.0]), torch.tensor([1]), torch.tensor([0.1])
    )
    assert result.row_loss.item() == pytest.approx(-0.5 * math.log(0.25 * 0.75))
    assert result.loss.item() == pytest.approx(0.1 * result.row_loss.item())
    assert result.prediction.tolist() == [1]
    assert result.alpha.item() == pytest.approx(0.25 + 0.4)
    # run() asks for the gradient of 3 x the loss
    torch.testing.assert_close(d_weight.flatten(), 3 * 0.1 * torch.tensor([-0.25, 0.25]))
    assert d_h.item() == pytest.approx(3 * 0.1 * 0.25 * math.log(3))


@pytest.mark.parametrize("op", [draft_loss, draft_loss_reference])
def test_no_rows(op):
    """A batch that supervises nothing gives NaN, or no gradient at all; there may be no teacher entry either."""
    h, weight, teacher, lse, taught, row_weights = inputs(0, 7)
    for entries in (1, 0):
        result, d_h, d_weight = run(op, h, weight, teacher[:entries], lse[:entries], taught, row_weights)
        assert result.loss.item() == 0.0
        assert result.prediction.shape == result.alpha.shape == result.row_loss.shape == d_h.shape[:1] == (0,)
        assert not d_weight.any()


@pytest.mark.parametrize("op", [draft_loss, draft_loss_reference])
def test_row_of_weight_zero(op):
    """It costs nothing and moves nothing, but is predicted and measured."""
    h, weight, teacher, lse, taught, row_weights = inputs(30, 7)
    zero = row_weights == 0
    assert 0 < zero.sum() < 30, "the test needs both kinds"
    result, d_h, _ = run(op, h, weight, teacher, lse, taught, row_weights)
    assert not d_h[zero].any()
    assert d_h[~zero].any(-1).all()
    assert (result.row_loss > 0).all()
    assert (result.alpha > 0).all()
    assert not result.row_loss.requires_grad


@pytest.mark.parametrize("vocab", [7, 1000])
@pytest.mark.parametrize("scale", [1.0, 0.8**3 / 1237])
def test_bfloat16_error_is_at_most_twice_the_formulas(vocab, scale):
    """Softmax, sum or weight rounded to bf16 on the way. The error is against fp32 on the same inputs."""
    h, weight, teacher, *rest = inputs(200, vocab, 32, torch.bfloat16, scale)
    exact, *exact_grads = run(draft_loss_reference, h.float(), weight.bfloat16().float(), teacher.float(), *rest)
    plain, *plain_grads = run(draft_loss_reference, h, weight, teacher, *rest)
    found, *found_grads = run(draft_loss, h, weight, teacher, *rest)
    # a sum of 200 rows can be right by luck: the budget of the scalar is that of its terms
    loss_budget = (exact.loss / 200).abs() * torch.finfo(torch.bfloat16).eps
    assert (found.loss - exact.loss).abs() <= 2 * (plain.loss - exact.loss).abs() + loss_budget
    assert (found.alpha - exact.alpha).norm() <= 2 * (plain.alpha - exact.alpha).norm() + 1e-6
    for name, e, p, f in zip(("h", "weight"), exact_grads, plain_grads, found_grads, strict=True):
        assert f.dtype == p.dtype
        assert (f - e).norm() <= 2 * (p - e).norm(), name


def test_large_logits_stay_finite():
    """exp without the maximum taken off; a teacher that is certain."""
    h, weight, teacher, lse, *rest = inputs(6, 50)
    result, d_h, d_weight = run(draft_loss, h * 1e3, weight * 10, teacher * 1e3, lse * 1e3, *rest)
    for x in (result.loss, result.row_loss, result.alpha, d_h, d_weight):
        assert x.isfinite().all()


def test_nothing_of_size_rows_by_vocab_is_kept():
    """Logits saved for the backward, as the definition does (which shows that we would see it)."""

    def kept_elements(op, rows):
        kept = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.setdefault(x.data_ptr(), x.numel()) and x, lambda x: x
        )
        h, weight, *rest = inputs(rows, 1000, 8)
        with hooks:
            op(h.requires_grad_(), weight.requires_grad_(), *rest)
        return max(kept.values())

    assert kept_elements(draft_loss_reference, 200) >= 200 * 1000
    assert kept_elements(draft_loss, 200) == 1000 * 8


def test_evaluation_makes_no_gradients():
    """A frozen lm_head that pays for its gradient, held-out evaluation that still pays for the gradient's two products (autograd tells a Function of weights
    that need gradients even inside no_grad)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
            return func(*args, **(kwargs or {}))

    h, weight, *rest = inputs(4, 7)
    h.requires_grad_()
    with Products() as frozen:
        draft_loss(h, weight, *rest)
    weight.requires_grad_()
    with Products() as training:
        draft_loss(h, weight, *rest)
    with torch.no_grad(), Products() as evaluating:
        draft_loss(h, weight, *rest)
    assert (training.count, frozen.count, evaluating.count) == (3, 2, 1)
