"""The optimisers and their schedule: a learning rate is a function of the step, so resuming needs no state of it."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from eagle3.errors import ConfigError
from eagle3_train.config import OptimConfig

# looked up by token id, not multiplied as a whole: AdamW's even under muon
TABLES = ("embed_tokens", "lm_head")


def make_optimizer(parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> torch.optim.Optimizer:
    """The optimiser `config.name` of fp32 weights, by name; weight decay touches matrices only.

    Raises:
        ConfigError: it is in no package that is installed.
    """
    trainable = [(name, p) for name, p in parameters if p.requires_grad]
    assert all(p.dtype == torch.float32 for _, p in trainable), "trainable weights must be fp32"
    hidden = [p for name, p in trainable if config.name == "muon" and p.dim() == 2 and not _is_table(name)]
    ids = {id(p) for p in hidden}
    rest = [p for _, p in trainable if id(p) not in ids]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = _adamw_8bit() if config.name == "adamw8bit" else torch.optim.AdamW
    others = adamw(groups, lr=config.lr, betas=(config.beta1, config.beta2))
    return others if config.name != "muon" else MuonAdamW(_muon(hidden, config), others)


class MuonAdamW(torch.optim.Optimizer):
    """Muon on its groups and AdamW on the others, as one optimiser: frameworks and checkpoints know one.

    Updates of Muon have the size of AdamW's (`match_rms_adamw`), so one learning rate serves both.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer):
        self._parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is None, "the trainer's steps have no closure"
        for part, kind in zip(self._parts, ("momentum", "betas"), strict=True):
            # loading a state, or sharding the weights, puts other groups in place of these
            part.param_groups = [group for group in self.param_groups if kind in group]
            part.state = self.state
            part.step()


def _is_table(name: str) -> bool:
    return any(part in TABLES for part in name.split("."))


def _muon(matrices: Sequence[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"optim.name muon needs torch 2.9 or later, found {torch.__version__}; use adamw")
    return torch.optim.Muon(
        matrices,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )


def _adamw_8bit() -> Callable[..., torch.optim.Optimizer]:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise ConfigError("optim.name adamw8bit needs bitsandbytes: pip install bitsandbytes (or use adamw)") from None
    return AdamW8bit


def learning_rate(step: float, max_steps: float, config: OptimConfig) -> float:
    """Linear warm-up, then cosine to `final_ratio` of the peak at the last step (step counts from 0).

    A run that tokens or seconds end counts these (eagle3_train.limits.schedule_place).
    """
    warmup = max(1, round(config.warmup_ratio * max_steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = min(1.0, (step + 1 - warmup) / max(1, max_steps - warmup))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_ratio + (1 - config.final_ratio) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
