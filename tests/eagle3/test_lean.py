"""The head's lean functions against autograd of their formulas, and what they keep."""

import pytest
import torch
import torch.nn.functional as F

from eagle3.heads.lean import rms_norm, silu_times


def plain_norm(x, weight, eps=1e-3):
    return weight * x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


def draw(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def run(function, inputs, dtype=None):
    """(output, gradients) for a fixed cotangent; the inputs in another dtype if asked."""
    inputs = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    out = function(*inputs)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, cotangent)]


CASES = {
    "norm": (lambda x, w: rms_norm(x, w, 1e-3), plain_norm, [(5, 3, 16), (16,)]),
    "norm of no rows": (lambda x, w: rms_norm(x, w, 1e-3), plain_norm, [(0, 16), (16,)]),
    "silu": (silu_times, lambda a, b: F.silu(a) * b, [(5, 7), (5, 7)]),
}


@pytest.mark.parametrize("lean, plain, shapes", CASES.values(), ids=CASES.keys())
def test_values_and_gradients(lean, plain, shapes):
    """A wrong factor in a closed form; an input that is written over."""
    inputs = draw(*shapes)
    before = [x.detach().clone() for x in inputs]
    for found, wanted in zip(run(lean, inputs), run(plain, inputs, torch.float64), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, inputs, before))
    with torch.no_grad():
        torch.testing.assert_close(lean(*inputs), plain(*inputs))


@pytest.mark.parametrize("lean, plain, shapes", CASES.values(), ids=CASES.keys())
def test_bfloat16_error_is_at_most_twice_the_formulas(lean, plain, shapes):
    """A norm or a gradient summed in bf16; gradients in another dtype than their inputs'."""
    inputs = draw(*shapes, dtype=torch.bfloat16)
    exact = run(plain, inputs, torch.float64)
    for found, formula, wanted in zip(run(lean, inputs), run(plain, inputs), exact, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found - wanted).norm() <= 2 * (formula - wanted).norm() + 1e-12


@pytest.mark.parametrize("lean, plain, shapes", CASES.values(), ids=CASES.keys())
def test_keeps_no_more_than_its_inputs(lean, plain, shapes):
    """What autograd keeps of the formula: each intermediate."""

    def kept(function):
        elements = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda x: elements.setdefault(x.data_ptr(), x.numel()) and x, lambda x: x
        )
        inputs = draw(*shapes)
        with hooks:
            function(*inputs)
        return sum(elements.values()) - sum(x.numel() for x in inputs)

    rows = torch.Size(shapes[0][:-1]).numel()
    assert kept(lean) <= rows
    if rows:
        assert kept(plain) > rows


def test_a_frozen_weight_gets_no_gradient():
    """Work, and a crash, for the gradient of a norm that is not trained; of an input that needs none."""
    x, weight = draw((3, 4), (4,))
    rms_norm(x, weight.detach(), 1e-3).sum().backward()
    assert x.grad is not None
    rms_norm(x.detach(), weight, 1e-3).sum().backward()
    assert weight.grad is not None
