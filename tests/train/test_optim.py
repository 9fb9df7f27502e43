"""The schedule by its corners, what each optimiser is given and does, and the average of weights."""

import math
import sys
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from eagle3.errors import ConfigError
from eagle3_train.config import OptimConfig
from eagle3_train.ema import EMA
from eagle3_train.optim import MuonAdamW, learning_rate, make_optimizer, set_learning_rate

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


def test_weight_decay_touches_matrices_only():
    """Norm weights pulled to zero."""
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = make_optimizer(module.named_parameters(), OptimConfig(weight_decay=0.3, beta1=0.8, beta2=0.9))
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
        make_optimizer(nn.Linear(2, 2, dtype=torch.bfloat16).named_parameters(), OptimConfig())


def test_frozen_weights_are_left_out():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    groups = make_optimizer(module.named_parameters(), OptimConfig()).param_groups
    assert [len(group["params"]) for group in groups] == [1, 0]


needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


class SmallHead(nn.Module):
    """Modules under the head's names, of every kind that the optimiser tells apart; always the same weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 4, bias=False)
        self.norm = nn.RMSNorm(4)
        self.embed_tokens = nn.Embedding(7, 4)
        self.lm_head = nn.Linear(4, 5, bias=False)

    def backward(self):
        h = self.norm(self.fc(torch.linspace(-1, 1, 18).view(3, 6))) + self.embed_tokens.weight[:3]
        self.lm_head(h).logsumexp(-1).sum().backward()


def learn(module, optimizer, steps):
    for _ in range(steps):
        module.backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


MUON = OptimConfig(name="muon", lr=0.01, weight_decay=0.1, momentum=0.9)


@needs_muon
def test_muon_on_hidden_matrices_alone():
    """Muon on an embedding, on lm_head or on a norm; AdamW left out, or on everything."""
    module = SmallHead()
    start = state_of(module)
    learn(module, make_optimizer(module.named_parameters(), MUON), 1)
    moved = {name: p - start[name] for name, p in state_of(module).items()}
    # one step of each alone, on the same gradients
    alone = SmallHead()
    alone.backward()
    muon = torch.optim.Muon([alone.fc.weight], lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [
            {"params": [alone.embed_tokens.weight, alone.lm_head.weight], "weight_decay": 0.1},
            {"params": [alone.norm.weight], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    muon.step()
    adamw.step()
    for name, p in alone.named_parameters():
        torch.testing.assert_close(moved[name], p.detach() - start[name], rtol=0, atol=0, msg=name)


@needs_muon
def test_muon_resumes_bit_by_bit():
    """States that are loaded into other groups than those that step, or a learning rate of one part only."""
    module = SmallHead()
    optimizer = make_optimizer(module.named_parameters(), MUON)
    learn(module, optimizer, 3)
    half, states = state_of(module), deepcopy(optimizer.state_dict())
    set_learning_rate(optimizer, 0.003)
    learn(module, optimizer, 3)
    again = SmallHead()
    again.load_state_dict(half)
    resumed = make_optimizer(again.named_parameters(), MUON)
    resumed.load_state_dict(states)
    assert isinstance(resumed, MuonAdamW)
    set_learning_rate(resumed, 0.003)
    learn(again, resumed, 3)
    for name, p in state_of(module).items():
        assert torch.equal(again.get_parameter(name), p), name
        assert not torch.equal(half[name], p), name


def test_muon_of_an_old_torch(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ConfigError, match=r"muon needs torch 2\.9"):
        make_optimizer(SmallHead().named_parameters(), MUON)


def test_8_bit_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        make_optimizer(SmallHead().named_parameters(), OptimConfig(name="adamw8bit"))


def test_8_bit_takes_the_settings(monkeypatch):
    """Settings that get lost on the way to the library."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", SimpleNamespace(AdamW8bit=torch.optim.AdamW))
    config = OptimConfig(name="adamw8bit", lr=0.5, beta1=0.7, weight_decay=0.2)
    optimizer = make_optimizer(SmallHead().named_parameters(), config)
    assert [(g["lr"], g["betas"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups] == [
        (0.5, (0.7, 0.95), 0.2, 3),
        (0.5, (0.7, 0.95), 0.0, 1),
    ]


def test_average_by_hand():
    """The first step decays by 2/11, not by 0.9; later ones by the given decay at most."""
    weight = torch.tensor([1.0, -2.0])
    ema = EMA({"w": weight}, 0.9)
    assert ema.averages is not None
    wanted = weight.clone()
    for step in range(1, 200):
        weight += 0.5
        decay = min(0.9, (1 + step) / (10 + step))
        wanted = decay * wanted + (1 - decay) * weight
        ema.update({"w": weight}, step)
        torch.testing.assert_close(ema.averages["w"], wanted)
    assert math.isclose((weight - wanted)[0], 0.5 * 0.9 / 0.1, rel_tol=1e-3), "it lags by decay / (1 - decay) steps"


def test_no_average():
    """Memory for what nobody asked for."""
    ema = EMA({"w": torch.ones(2)}, 0.0)
    ema.update({"w": torch.ones(2)}, 1)
    assert ema.averages is None
