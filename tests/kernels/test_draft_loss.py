"""Fused draft loss against its definition, in value, prediction, alpha and gradients."""

import math
from typing import Any

import pytest
import torch

from eagle3_kernels.draft_loss import draft_loss, fused, rows
from eagle3_kernels.draft_loss.reference import draft_loss_reference
from eagle3_kernels.loss_terms import LOSS_TERMS, check_terms


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
    """Logits kept for the backward, as the definition does (which shows that we would see it)."""
    from torch.profiler import ProfilerActivity, profile

    def kept_bytes(op, rows):
        h, weight, *rest = inputs(rows, 1000, 8)
        arguments = h.requires_grad_(), weight.requires_grad_(), *rest
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = op(*arguments)
        assert result.loss.requires_grad
        assert profiler.profiler is not None
        assert profiler.profiler.kineto_results is not None
        events: list[Any] = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        return sum(e.nbytes() for e in events)

    assert kept_bytes(draft_loss_reference, 200) >= 4 * 200 * 1000
    # the two gradients, and 8 + 4 + 4 bytes of each row's results
    assert kept_bytes(draft_loss, 200) < 4 * (1000 * 8 + 200 * 8) + 200 * 16 + 200


def test_evaluation_makes_no_gradients():
    """A frozen lm_head that pays for its gradient; held-out evaluation that pays for both (autograd tells a Function of
    weights that need gradients even inside no_grad)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
            return func(*args, **(kwargs or {}))

    h, weight, *_ = arguments = inputs(4, 7)
    h.requires_grad_()
    with Products() as frozen:
        draft_loss(*arguments)
    weight.requires_grad_()
    with Products() as training:
        draft_loss(*arguments)
    with torch.no_grad(), Products() as evaluating:
        draft_loss(*arguments)
    assert (training.count, frozen.count, evaluating.count) == (3, 2, 1)


MIXES = [
    *({name: 1.0} for name in LOSS_TERMS),
    {"soft_ce": 0.0, "tv": 0.7},
    {"kl": 0.3, "reverse_kl": 0.5, "lk_lambda": 2.0},
    {name: 0.1 + i for i, name in enumerate(LOSS_TERMS)},
]


def check_against_fp64(terms, h, weight, teacher, lse, taught, row_weights, tolerance):
    """Values and gradients against eager autograd in fp64 on the very same inputs."""
    double = (x.double() for x in (h, weight, teacher, lse))
    wanted, *wanted_grads = run(draft_loss_reference, *double, taught, row_weights.double(), terms)
    assert wanted.loss.dtype == torch.float64
    found, *found_grads = run(draft_loss, h, weight, teacher, lse, taught, row_weights, terms)
    torch.testing.assert_close(found.loss.double(), wanted.loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.row_loss.double(), wanted.row_loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.alpha.double(), wanted.alpha, rtol=tolerance, atol=tolerance)
    assert torch.equal(found.prediction, wanted.prediction)
    for name, f, w in zip(("h", "weight"), found_grads, wanted_grads, strict=True):
        assert (f - w).norm() <= tolerance * w.norm() + 1e-12, f"d {name}: {(f - w).norm() / w.norm()}"


@pytest.mark.parametrize("terms", MIXES, ids=lambda terms: "+".join(terms))
@pytest.mark.parametrize("vocab", [7, 1000])
@pytest.mark.parametrize("mass", [1.0, 0.6, 1e-3])
def test_terms_equal_eager_fp64(terms, vocab, mass, monkeypatch):
    """A wrong sign, mask, factor or constant in a closed form; p taken for P; a chunk's or a pass's edge."""
    monkeypatch.setattr(fused, "CHUNK", 8 * vocab)
    monkeypatch.setattr(rows, "CACHED", 3 * vocab)
    h, weight, teacher, _, *rest = inputs(19, vocab)
    lse = teacher.logsumexp(-1) - math.log(mass)
    check_against_fp64(terms, h, weight, teacher, lse, *rest, tolerance=1e-4)


@pytest.mark.parametrize("terms", [{"soft_ce": 1.0}, MIXES[-1]], ids=["soft_ce", "mix"])
def test_terms_at_a_whole_vocabulary(terms):
    """Sums over 131073 tokens (odd, larger than a pass): rounding that grows with the vocabulary, rows cut wrongly."""
    h, weight, teacher, lse, *rest = inputs(5, 131073, 8)
    check_against_fp64(terms, h, weight, teacher, lse, *rest, tolerance=2e-4)


@pytest.mark.parametrize("name", LOSS_TERMS)
def test_terms_at_their_extremes(name):
    """exp or 1 / alpha overflowing where draft and teacher are certain, of the same token or of another."""
    weight = torch.eye(4)
    h = 200 * torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 0, 0]])
    teacher = 200 * torch.tensor([[1.0, 0, 0, 0]])
    arguments = teacher, torch.tensor([200.0]), torch.zeros(3, dtype=torch.int64), torch.ones(3)
    result, d_h, d_weight = run(draft_loss, h, weight, *arguments, {name: 1.0})
    for x in (result.row_loss, result.alpha, d_h, d_weight):
        assert x.isfinite().all()
    assert result.alpha.tolist() == pytest.approx([1, 0, 0.25])
    # nothing to learn where they agree
    assert result.row_loss[0].item() == pytest.approx(0, abs=1e-6)
    assert d_h[0].abs().max() < 1e-5
    assert result.row_loss[1] > result.row_loss[2] > 0


def test_terms_by_hand():
    """Every term as its own sum: q = (1/4, 3/4), p = (1/2, 1/2), P = (0.4, 0.4)."""
    h, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    arguments = torch.full((1, 2), math.log(0.4)), torch.zeros(1), torch.tensor([0]), torch.tensor([1.0])
    alpha, kl = 0.65, math.log(0.5) - 0.5 * math.log(3 / 16)
    wanted = {
        "soft_ce": -0.5 * math.log(3 / 16),
        "kl": kl,
        "reverse_kl": 0.25 * math.log(0.5) + 0.75 * math.log(1.5),
        "tv": 1 - alpha,
        "lk_alpha": -math.log(alpha),
        "lk_lambda": math.exp(-3 * alpha) * kl + (1 - math.exp(-3 * alpha)) * (1 - alpha),
        "hard_ce": math.log(4),
    }
    for op in (draft_loss, draft_loss_reference):
        for name, value in wanted.items():
            assert op(h, weight, *arguments, {name: 2.0}).row_loss.item() == pytest.approx(2 * value, rel=1e-5), name
    assert wanted.keys() == set(LOSS_TERMS)


@pytest.mark.parametrize("name", LOSS_TERMS)
def test_terms_skip_rows_of_weight_zero(name):
    """A row that does not count moves the head through a term's own factor."""
    h, weight, teacher, lse, taught, row_weights = inputs(30, 7)
    _, d_h, _ = run(draft_loss, h, weight, teacher, lse, taught, row_weights, {name: 1.0})
    assert not d_h[row_weights == 0].any()
    assert d_h[row_weights > 0].any(-1).float().mean() > 0.8


@pytest.mark.parametrize("name", LOSS_TERMS)
def test_a_nan_teacher_shows(name):
    """NaN of a broken target swallowed by a max, a mask or a comparison: the head would learn from garbage."""
    h, weight, teacher, lse, taught, row_weights = inputs(30, 7)
    teacher[taught[3], 2] = torch.nan
    row_weights[3] = 1.0
    lse = torch.where(teacher.isnan().any(-1), torch.nan, lse)
    result, d_h, _ = run(draft_loss, h, weight, teacher, lse, taught, row_weights, {name: 1.0})
    assert result.loss.isnan()
    assert d_h[3].isnan().any()
    assert d_h[taught != taught[3]].isfinite().all()


def test_only_what_the_terms_need_is_computed():
    """soft_ce alone paying for the other terms: their passes over [m, Vd]."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Touched(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket not in (torch.ops.aten.split, torch.ops.aten.slice):
                self.elements += sum(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if x.dim() == 2)
            return out

    def passes(terms):
        arguments = inputs(4, 10_000, 1)
        with Touched() as mode:
            run(draft_loss, *arguments, terms)
        return mode.elements / 40_000

    assert passes({"soft_ce": 1.0}) == passes({"soft_ce": 1.0, "tv": 0.0}) <= passes(MIXES[-1]) / 2


@pytest.mark.parametrize(
    "terms, message",
    [
        ({"soft_cee": 1.0}, "did you mean 'soft_ce'"),
        ({"focal": 1.0}, "known: soft_ce"),
        ({"tv": -1.0}, "weight of tv is -1.0"),
        ({"tv": math.inf}, "weight of tv is inf"),
        ({"tv": math.nan}, "weight of tv is nan"),
        ({"tv": 0.0, "kl": 0.0}, "no term has a weight above 0"),
        ({}, "no term has a weight above 0"),
    ],
)
def test_bad_mixes_are_refused(terms, message):
    """A misspelt term trains without it, a weight of 0 on all trains nothing."""
    with pytest.raises(ValueError, match=message):
        check_terms(terms)
    with pytest.raises(ValueError, match=message):
        draft_loss(*inputs(4, 7), terms)


def test_a_second_backward_is_refused():
    """Gradients are scaled in place: the second backward of a kept graph would be off by the first's factor."""
    h, weight, *_ = arguments = inputs(9, 7)
    h.requires_grad_()
    weight.requires_grad_()
    loss = draft_loss(*arguments).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run the forward again"):
        loss.backward()
