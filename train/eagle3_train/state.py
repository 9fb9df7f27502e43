"""Checkpoints of a run: written under a temporary name and renamed, so a kill leaves the last whole one."""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.errors import CheckpointError, ConfigError, Eagle3Error
from eagle3_train.config import TrainConfig
from eagle3_train.tracking import write_json

KEEP = 2
PROGRESS = "progress.json"
# settings that a resumed run may change without being another run
FREE = {
    "output",
    "eval",
    "save_every",
    "log_every",
    "threads",
    "log_with",
    "project",
    "resume",
    "device",
}


@dataclass
class RunState:
    """How far a run has come."""

    step: int = 0
    tokens: int = 0
    best_tau: float = 0.0
    best_step: int = 0
    # evaluations without a better tau
    since_best: int = 0
    tracker: dict[str, Any] = dataclasses.field(default_factory=dict)

    def judge(self, tau: float) -> bool:
        """Take note of an evaluation; whether it is the best so far."""
        better = tau > self.best_tau
        self.since_best = 0 if better else self.since_best + 1
        if better:
            self.best_tau, self.best_step = tau, self.step
        return better


class Checkpoints:
    """`<run>/checkpoints/step-00000100`: accelerate's state (weights fp32, optimiser, RNG) and our progress."""

    def __init__(self, folder: Path, accelerator: Any):
        self.folder, self.accelerator = folder, accelerator

    def latest(self) -> Path | None:
        whole = [p for p in self.folder.glob("step-*") if (p / PROGRESS).is_file()]
        return max(whole, default=None, key=lambda p: p.name)

    def save(self, state: RunState, config: TrainConfig, head_config: Any) -> None:
        """Write a checkpoint of all ranks' state; older ones but the last are removed."""
        final = self.folder / f"step-{state.step:08d}"
        part = self.folder / f".{final.name}.part"
        main = self.accelerator.is_main_process
        if main:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(part), safe_serialization=True)
        self.accelerator.wait_for_everyone()
        if main:
            record = {"state": state, "config": config, "head": head_config}
            write_json(part / PROGRESS, {k: dataclasses.asdict(v) for k, v in record.items()})
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
            for old in sorted(self.folder.glob("step-*"))[:-KEEP]:
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()

    def load(self, path: Path, config: TrainConfig, head_config: Any) -> tuple[RunState, list[str]]:
        """Restore a checkpoint into what accelerate prepared.

        Returns:
            (the state, settings that differ from the checkpoint's, as text)
        Raises:
            ConfigError: the head's architecture differs.
            CheckpointError: a file of it is missing or damaged.
        """
        try:
            return self._load(path, config, head_config)
        except Eagle3Error:
            raise
        except Exception as error:  # safetensors, pickle, zip, JSON of any shape: each reader raises its own
            detail = next(iter(str(error).splitlines()), "")
            raise CheckpointError(
                f"{path} cannot be loaded ({type(error).__name__}: {detail}); remove that checkpoint to go on"
            ) from error

    def _load(self, path: Path, config: TrainConfig, head_config: Any) -> tuple[RunState, list[str]]:
        record = json.loads((path / PROGRESS).read_text())
        mine = _plain(head_config)
        differing = sorted(k for k, v in mine.items() if record["head"].get(k) != v)
        if differing:
            raise ConfigError(
                f"{path} holds a head with other {', '.join(differing)}; give another output folder to start anew"
            )
        self.accelerator.load_state(str(path))
        return RunState(**record["state"]), _changes(record["config"], _plain(config))


def _plain(config: Any) -> dict[str, Any]:
    """A dataclass as JSON would give it back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _changes(old: Any, new: Any, name: str = "") -> list[str]:
    if name in FREE:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        inner = [_changes(old.get(k), v, f"{name}.{k}" if name else k) for k, v in new.items()]
        return [change for part in inner for change in part]
    return [] if old == new else [f"{name}: {old} -> {new}"]
