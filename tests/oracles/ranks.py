"""Runs of train_draft.py on several ranks, each a process of its own, forked from one that has loaded torch already.

A launcher's processes take most of their time to load it; what these do is the same.
"""

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracles.script import SCRIPT

# what `accelerate launch --config_file recipes/accelerate/<kind>.yaml` sets for our script
KINDS: dict[str, dict[str, str]] = {
    "ddp": {},
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"},
    **{f"zero{i}": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(i)} for i in (1, 2, 3)},
}
PRELOAD = ["eagle3_train.run", "eagle3_train.checkpoints", "eagle3_infer.engine", "transformers.models.llama"]


@dataclass
class Ranks:
    """Running ranks, and where each writes its output."""

    processes: list[Any]
    outputs: list[Path]
    # gone with this object
    folder: tempfile.TemporaryDirectory

    def wait(self, timeout: float = 300) -> list[int]:
        """Exit codes by rank; a rank that runs longer is killed, which is an error."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        late = [i for i, process in enumerate(self.processes) if process.exitcode is None]
        for i in late:
            self.processes[i].kill()
            self.processes[i].join()
        assert not late, f"ranks {late} still ran after {timeout} s:\n{self.output(late[0])}"
        return [process.exitcode for process in self.processes]

    def output(self, rank: int = 0) -> str:
        return self.outputs[rank].read_text(errors="replace")


def start_ranks(words: Sequence[str], kind: str = "ddp", world: int = 2, patch: str = "") -> Ranks:
    """train_draft.py with these arguments on `world` ranks.

    Args:
        kind: of KINDS.
        patch: Python that every rank executes first (to make one fail).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    folder = tempfile.TemporaryDirectory(prefix="ranks-")
    common = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes, outputs = [], []
    for rank in range(world):
        env = {**KINDS[kind], **common, "RANK": rank, "LOCAL_RANK": rank, "DS_ACCELERATOR": "cpu"}
        outputs.append(Path(folder.name) / f"rank{rank}.log")
        settings = {name: str(value) for name, value in env.items()}
        processes.append(context.Process(target=_rank, args=(settings, outputs[-1], list(words), patch)))
        processes[-1].start()
    return Ranks(processes, outputs, folder)


def train_ranks(words: Sequence[str], kind: str = "ddp", world: int = 2) -> None:
    """`start_ranks`, to a good end."""
    ranks = start_ranks(words, kind, world)
    assert ranks.wait() == [0] * world, "\n".join(ranks.output(rank) for rank in range(world))


def _rank(env: Mapping[str, str], output: Path, words: list[str], patch: str) -> None:
    os.environ.update(env)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    exec(patch, {})
    sys.exit(runpy.run_path(str(SCRIPT))["main"](words))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
