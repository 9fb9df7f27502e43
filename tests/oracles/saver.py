"""A small module's checkpoints, and a process that writes one after the other until it is killed."""

import multiprocessing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eagle3_train.accelerator import open_accelerator
from eagle3_train.checkpoints import Checkpoints
from eagle3_train.config import OptimConfig, TrainConfig
from eagle3_train.optim import make_optimizer
from eagle3_train.parallel import parallelize
from eagle3_train.state import RunState

CONFIG, HEAD = TrainConfig(max_steps=9), OptimConfig()


class Small(nn.Module):
    """A matrix, a bias, an integer buffer that belongs to the weights and one that does not."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("ids", torch.arange(width))
        self.register_buffer("table", torch.ones(width), persistent=False)

    def forward(self, x):
        return self.layer(x).pow(2).sum()


def made(width=8, seed=0, **optim):
    torch.manual_seed(seed)
    module = Small(width)
    return parallelize(
        open_accelerator("cpu"), module, make_optimizer(module.named_parameters(), OptimConfig(**optim)), 1.0
    )


def step(parallel, count=1):
    for i in range(count):
        with parallel.micro_batch(last=True):
            parallel.backward(parallel(torch.ones(2, parallel.module.ids.numel())))
        parallel.step(0.01 / (i + 1), i + 1)


def save(folder, parallel, at, average=None) -> Path:
    state = RunState(step=at, best_tau=1 / 3, tracker={"run_id": "x"})
    Checkpoints(folder, parallel).save(state, CONFIG, HEAD, average)
    return latest(folder, parallel)


def latest(folder, parallel) -> Path:
    path = Checkpoints(folder, parallel).latest()
    assert path is not None
    return path


def start_saving(folder: Path, width: int, at: int) -> Any:
    """The process: its checkpoints' steps count from `at`, and every weight of one is its step."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["oracles.ranks", "oracles.saver", "eagle3_train.run"])
    process = context.Process(target=_save_for_ever, args=(folder, width, at))
    process.start()
    return process


def _save_for_ever(folder: Path, width: int, at: int) -> None:
    parallel = made(width)
    step(parallel)
    while True:
        at += 1
        for p in parallel.parameters.values():
            p.data.fill_(at)
        save(folder, parallel, at)
