"""The schedule by its corners, and what the optimiser is given."""

import pytest
import torch
from torch import nn

from eagle3.errors import Eagle3Error
from eagle3_train.config import OptimConfig
from eagle3_train.optim import check_finite, learning_rate, make_optimizer, set_learning_rate

CONFIG = OptimConfig(lr=1.0, warmup_ratio=0.1, final_ratio=0.02)


def test_schedule_by_its_corners():
    """A first step at zero, a warm-up that ends late, a cosine that stops short of its end."""
    rates = [learning_rate(step, 100, CONFIG) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.02)
    assert rates[54] == pytest.approx((1 + 0.02) / 2)
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("max_steps", [1, 2, 3])
def test_schedule_of_few_steps(max_steps):
    """Division by zero where warm-up takes all steps."""
    rates = [learning_rate(step, max_steps, CONFIG) for step in range(max_steps + 2)]
    assert all(0 < rate <= 1 for rate in rates)


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), torch.tensor(float("nan"))])
def test_gradients_that_are_not_finite(norm):
    with pytest.raises(Eagle3Error, match=r"step 7.*not finite.*optim\.lr"):
        check_finite(norm, 7)


def test_finite_gradients():
    check_finite(torch.tensor(3.0), 7)
    check_finite(None, 7)


def test_weight_decay_touches_matrices_only():
    """Norm weights pulled to zero."""
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = make_optimizer(module.parameters(), OptimConfig(weight_decay=0.3, beta1=0.8, beta2=0.9))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in module.named_parameters()} == {
        "0.weight": 0.3,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
    }
    assert all(group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_bf16_weights_are_refused():
    """AdamW at small learning rates leaves bf16 weights where they are."""
    with pytest.raises(AssertionError, match="fp32"):
        make_optimizer(nn.Linear(2, 2, dtype=torch.bfloat16).parameters(), OptimConfig())


def test_frozen_weights_are_left_out():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    groups = make_optimizer(module.parameters(), OptimConfig()).param_groups
    assert [len(group["params"]) for group in groups] == [1, 0]
